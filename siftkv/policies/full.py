"""`full`: every token in the model's own 16-bit format. The reference that every other policy is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import UNLIMITED, DecodeRule, Policy, PromptView, check_window


@dataclass(frozen=True)
class Full(Policy):
    """Keep everything, exactly.

    window: recent tokens that stand in the ring before they move to 16-bit pages; it changes where they are, not what
        they are.
    """

    name: ClassVar[str] = "full"
    positional: ClassVar[bool] = True
    any_window: ClassVar[bool] = True

    window: int = 16
    sinks: int = 0

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(TierFormat.parse(dense), scores=False, positions=False),)

    def classify(self, prompt: PromptView) -> Tensor:
        return torch.zeros(prompt.score.shape, dtype=torch.int8, device=prompt.score.device)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        shape = (num_layers, num_kv_heads, 1)
        return DecodeRule(torch.zeros(shape), torch.full(shape, UNLIMITED))
