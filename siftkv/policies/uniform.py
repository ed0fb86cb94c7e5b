"""`uniform:k8v4`: every token that leaves the window in one format, nothing dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import UNLIMITED, DecodeRule, Policy, PromptView, check_window


@dataclass(frozen=True)
class Uniform(Policy):
    """One format for all tokens beyond the recent window and the first `sinks`.

    format: a name that `siftkv.formats.TierFormat.parse` knows. window, sinks: tokens that stay at 16 bits.
    """

    name: ClassVar[str] = "uniform"
    positional: ClassVar[bool] = True

    format: str = "k8v4"
    window: int = 64
    sinks: int = 4

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        TierFormat.parse(self.format)

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(TierFormat.parse(self.format), scores=False, positions=False),)

    def classify(self, prompt: PromptView) -> Tensor:
        return torch.zeros(prompt.score.shape, dtype=torch.int8, device=prompt.score.device)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        shape = (num_layers, num_kv_heads, 1)
        return DecodeRule(torch.zeros(shape), torch.full(shape, UNLIMITED))
