"""`fixed`: given shares of tokens by rank, for benchmarks that need a known ratio whatever the text (or the random
weights) say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import DROPPED, DecodeRule, Policy, PromptView, check_pair, check_whole, check_window
from siftkv.policies.importance import sampled_rows


@dataclass(frozen=True)
class Fixed(Policy):
    """The best `high_share` of each head's tokens in format `high`, the next `low_share` in format `low`, others
    dropped.

    A prompt is cut by rank of importance. While decoding, the tiers may hold their shares of `length` tokens a head:
    what comes in beyond that displaces the weakest, high to low to gone.
    """

    name: ClassVar[str] = "fixed"

    high_share: float = 0.2
    low_share: float = 0.6
    length: int = 2048
    high: str = "k4v4"
    low: str = "k4v2"
    window: int = 64
    sinks: int = 4
    sample: int = 8
    interval: int = 8

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        if not (0 <= self.high_share <= 1 and 0 <= self.low_share <= 1 and self.high_share + self.low_share <= 1):
            raise PolicyError(
                f"high_share={self.high_share}, low_share={self.low_share}: use shares "
                "between 0 and 1 that add up to 1 at most"
            )
        for name in ("length", "sample", "interval"):
            check_whole(name, getattr(self, name), 1)
        check_pair(self.high, self.low)

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(TierFormat.parse(self.high)), Tier(TierFormat.parse(self.low)))

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        return sampled_rows(length, self.sample)

    def classify(self, prompt: PromptView) -> Tensor:
        score = prompt.score.masked_fill(prompt.protected, -1.0)
        best_first = score.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(best_first).scatter_(-1, best_first, prompt.position.expand(best_first.shape))
        high, low = (round(share * prompt.length) for share in (self.high_share, self.low_share))
        tier = torch.full(score.shape, DROPPED, dtype=torch.int8, device=score.device)
        tier[rank < high + low] = 1
        tier[rank < high] = 0
        return tier

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        cap = torch.tensor([round(share * self.length) for share in (self.high_share, self.low_share)])
        shape = (num_layers, num_kv_heads, 2)
        return DecodeRule(torch.zeros(shape), cap.expand(shape).clone(), min(self.interval, self.window))
