"""`h2o`: half of the budget for recent tokens, half for those that drew most attention so far.

Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv 2306.14048),
algorithm 1. What differs: a token's own query does not count; a group of query heads counts by its maximum; while
decoding the weakest token is the one with the least *mean* attention since it came, where the paper compares sums,
which favour old tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from siftkv.policies.base import PromptView, check_whole
from siftkv.policies.budgets import HeldBudget, best, tiers_of
from siftkv.policies.importance import sampled_rows


@dataclass(frozen=True)
class H2O(HeldBudget):
    """Of a prompt, the newest half of the budget and the tokens with the largest accumulated attention from all later
    queries. While decoding, what leaves the window replaces the weakest heavy hitter, or goes.

    window: 0 = half of the budget, the paper's recent tokens. Fewer leave the rest of that half to the scores once
        decoding starts.
    sample: the prompt's sums are estimated from every `sample`-th query row and all of the last 256; 1 = every row.
    ratio, budget, length, format, sinks, interval: see `siftkv.policies.budgets.HeldBudget`; the paper's ratio is 0.2.
    """

    name: ClassVar[str] = "h2o"

    ratio: float = 0.2
    window: int = 0
    sample: int = 1

    def __post_init__(self) -> None:
        self.check_amount()
        check_whole("sinks", self.sinks, 0)
        if self.window == 0:
            object.__setattr__(self, "window", max(1, (self.held() - self.sinks) // 2))
        super().__post_init__()
        check_whole("sample", self.sample, 1)

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        return sampled_rows(length, self.sample)

    def classify(self, prompt: PromptView) -> Tensor:
        held = self.held(prompt.length)
        recent = max(self.window, held - held // 2)
        newest = prompt.position >= prompt.length - recent
        accumulated = prompt.score * (prompt.length - 1 - prompt.position)
        heavy = best(accumulated, prompt.protected | newest, max(0, held - recent - self.sinks))
        return tiers_of(heavy | newest)
