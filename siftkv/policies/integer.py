"""`int8` and `int4`: every token at 8 or at 4 bits, the plain integer caches that serving engines offer.

A scale and a zero-point a token and head, by minimum and maximum. They are `uniform:k8v8` and `uniform:k4v4` without
recent window and sinks (the newest token alone is at 16 bits). Keys are conditioned as for any other policy, which
plain integer caches do not do: open the engine with `conditioning="none"` to compare with those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import DecodeRule, Policy, PromptView, check_window
from siftkv.policies.budgets import keep_all


@dataclass(frozen=True)
class Int8(Policy):
    """Everything at 8 bits. window, sinks: tokens that stay at 16 bits."""

    name: ClassVar[str] = "int8"
    stored: ClassVar[str] = "k8v8"

    window: int = 1
    sinks: int = 0

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(TierFormat.parse(self.stored), scores=False, positions=False),)

    def classify(self, prompt: PromptView) -> Tensor:
        return torch.zeros(prompt.score.shape, dtype=torch.int8, device=prompt.score.device)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        return keep_all(num_layers, num_kv_heads)


@dataclass(frozen=True)
class Int4(Int8):
    """Everything at 4 bits. window, sinks: tokens that stay at 16 bits."""

    name: ClassVar[str] = "int4"
    stored: ClassVar[str] = "k4v4"
