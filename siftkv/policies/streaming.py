"""`streaming`: the first tokens and the last ones, nothing between.

Source: "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453). What differs: keys keep their
true positions, where the paper numbers tokens by their place in the cache; that matters beyond the length the model was
trained for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import DecodeRule, Policy, PromptView, check_whole, check_window
from siftkv.policies.budgets import check_budget, tiers_of


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep `sinks` first tokens and as many recent ones as the budget holds, all at 16 bits in the window.

    ratio: share of `length` tokens. budget: tokens a head instead, 0 = by `ratio`. length: tokens of context that
        `ratio` is of.
    sinks: first tokens. window: recent tokens, 0 = what the budget leaves.
    """

    name: ClassVar[str] = "streaming"

    ratio: float = 0.25
    budget: int = 0
    length: int = 2048
    sinks: int = 4
    window: int = 0

    def __post_init__(self) -> None:
        check_budget(self.ratio, self.budget)
        check_whole("length", self.length, 1)
        check_whole("sinks", self.sinks, 0)
        held = self.budget or round(self.ratio * self.length)
        if held <= self.sinks:
            raise PolicyError(f"a budget of {held} tokens leaves no room beside sinks={self.sinks}: raise it")
        if self.window == 0:
            object.__setattr__(self, "window", held - self.sinks)
        check_window(self.window, self.sinks)
        if self.window + self.sinks != held:
            raise PolicyError(
                f"window={self.window} and sinks={self.sinks} are not the budget of {held} tokens: leave one out"
            )

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(TierFormat.parse(dense), scores=False, positions=False),)

    def classify(self, prompt: PromptView) -> Tensor:
        return tiers_of(torch.zeros_like(prompt.score, dtype=torch.bool))

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        shape = (num_layers, num_kv_heads, 1)
        return DecodeRule(torch.zeros(shape), torch.zeros(shape, dtype=torch.int64))
