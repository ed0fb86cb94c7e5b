"""`snapkv`: of a prompt, what the last queries look at, and its neighbours.

Source: "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469). The defaults are those of its
LongBench experiments; the budget, which the paper varies from 1024 to 4096 tokens, is a ratio here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from siftkv.policies.base import PromptView
from siftkv.policies.budgets import PromptBudget
from siftkv.policies.scores import check_pool, observed


@dataclass(frozen=True)
class SnapKV(PromptBudget):
    """Keep the last `window` tokens of a prompt and, of those before, the ones that got most attention from them.

    ratio, budget, format, sinks: as in every budget policy; see `siftkv.policies.budgets.PromptBudget`.
    window: the observation window. kernel, pooling: attention is pooled over so many neighbours, `max` or `avg`.
    """

    name: ClassVar[str] = "snapkv"

    kernel: int = 7
    pooling: Literal["max", "avg"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pool(self.kernel, self.pooling)

    def importance(self, prompt: PromptView) -> Tensor:
        return observed(prompt, self.window, self.kernel, self.pooling)
