"""`quest`: keep everything, read only the pages that may matter to the query.

Source: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (arXiv 2406.10774). Memory is not saved,
only what attention reads. What differs: a page holds as many tokens as the cache's pages do (16 in the paper); a group
of query heads reads the same pages, by the largest of its bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.formats import Tier
from siftkv.policies.base import DecodeRule, Policy, PromptView, check_whole, check_window
from siftkv.policies.budgets import best, check_budget, check_format, check_room, format_of, keep_all, tiers_of


@dataclass(frozen=True)
class Quest(Policy):
    """Attention reads window, sinks, the page that is being filled, and of the full pages the best.

    ratio: share of the tokens so far that each head reads. budget: tokens that it reads instead, 0 = by `ratio`.
    format: of tokens beyond window and sinks, `dense` = the model's own.
    window, sinks: last and first tokens, which are always read and count towards the budget.
    dense_layers: first layers that read everything.
    """

    name: ClassVar[str] = "quest"

    ratio: float = 0.25
    budget: int = 0
    format: str = "dense"
    window: int = 1
    sinks: int = 0
    dense_layers: int = 2

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        check_budget(self.ratio, self.budget)
        check_room(self.budget or self.window + self.sinks, self.window + self.sinks)
        check_format(self.format)
        check_whole("dense_layers", self.dense_layers, 0)

    @property
    def skips(self) -> bool:
        return True

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(format_of(self.format, dense), scores=False),)

    def classify(self, prompt: PromptView) -> Tensor:
        return tiers_of(torch.ones_like(prompt.score, dtype=torch.bool))

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        return keep_all(num_layers, num_kv_heads)

    def pages(self, seen: int, tokens: int) -> int:
        """Full pages of `tokens` tokens that a head reads once it has seen `seen`; what is left of a page rounds up."""
        total = self.budget or round(self.ratio * seen)
        return -(-max(0, total - self.window - self.sinks) // tokens)

    def chosen(self, query: Tensor, least: Tensor, most: Tensor, count: int) -> Tensor:
        """Bool `[H, P]`: the `count` pages that each kv head reads; arguments as in `page_bounds`."""
        bounds = page_bounds(query, least, most)
        return best(bounds, torch.zeros_like(bounds, dtype=torch.bool), count)


def page_bounds(query: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """The most that a key of each page can give, fp32 `[H, P]`: `sum_c max(q_c least_c, q_c most_c)`, maximum over the
    group.

    query: fp32 `[Hq, D]`. least, most: fp32 `[H, P, D]`, each channel's extremes over a page's keys.
    """
    grouped = query.unflatten(0, (least.shape[0], -1))[:, :, None]  # [H, G, 1, D]
    return torch.maximum(grouped * least[:, None], grouped * most[:, None]).sum(-1).amax(1)
