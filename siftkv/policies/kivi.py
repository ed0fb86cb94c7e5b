"""`kivi:2`: everything stays, keys quantised by channel over 32 tokens, values by token over 32 channels.

Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (arXiv 2402.02750). Keys are as attention sees
them, after their rotation by position, and are not conditioned. What differs: a token's key and value move together,
once 32 tokens have left the window; in the paper keys move 128 at a time and values one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import CHANNEL_GROUP, Tier, TierFormat
from siftkv.policies.base import UNLIMITED, DecodeRule, Policy, PromptView, check_window

BITS = (2, 4)


@dataclass(frozen=True)
class Kivi(Policy):
    """Keep everything, in groups of 32 tokens.

    bits: of keys and values, 2 or 4. window: recent tokens at 16 bits (the paper's residual length); up to 31 more wait
        for their group at 16 bits. sinks: first tokens at 16 bits.
    """

    name: ClassVar[str] = "kivi"

    bits: int = 2
    window: int = 128
    sinks: int = 0

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        if self.bits not in BITS:
            raise PolicyError(f"bits={self.bits!r}: use 2 or 4")

    @property
    def moves(self) -> int:
        """Tokens that leave the first tier for the second at a time."""
        return CHANNEL_GROUP

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        names = dense, f"k{self.bits}v{self.bits}t"
        return tuple(Tier(TierFormat.parse(name), scores=False) for name in names)

    def classify(self, prompt: PromptView) -> Tensor:
        beyond = ~prompt.protected
        place = beyond.cumsum(0) - 1
        whole = beyond.sum() // CHANNEL_GROUP * CHANNEL_GROUP
        tier = (beyond & (place < whole)).to(torch.int8)
        return tier.expand(prompt.score.shape).clone()

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        cap = torch.zeros(num_layers, num_kv_heads, 2, dtype=torch.int64)
        cap[..., 0] = UNLIMITED
        return DecodeRule(torch.zeros(cap.shape), cap)
