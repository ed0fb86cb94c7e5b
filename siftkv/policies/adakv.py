"""`adakv`: SnapKV with one budget a layer, which its heads share out by what their tokens are worth.

Source: "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference" (arXiv
2407.11550), algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.policies.base import PromptView
from siftkv.policies.budgets import best
from siftkv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """A layer's `H` heads keep the `H * b` best tokens among all of them, less a share that every head is sure of.

    alpha: the safeguard, share of the mean budget `b` that every head gets whatever its tokens are worth; a head keeps
        `(1 - alpha) * (its tokens among the best) + alpha * b`.
    ratio, budget, format, window, sinks, kernel, pooling: as in `snapkv`.
    """

    name: ClassVar[str] = "adakv"

    alpha: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise PolicyError(f"alpha={self.alpha!r}: use a share between 0 and 1")

    def counts(self, prompt: PromptView, score: Tensor) -> Tensor:
        """int64 `[R, H]`; they add up to `H * b` within half a token a head."""
        mean = self.beyond(prompt.length)
        heads = score.shape[1]
        exempt = prompt.protected.expand(score.shape)
        pool = best(score.flatten(1)[:, None], exempt.flatten(1)[:, None], heads * mean)[:, 0]
        own = pool.view(score.shape).sum(-1)
        return ((1 - self.alpha) * own + self.alpha * mean).round().long()
