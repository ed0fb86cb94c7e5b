"""`tova`: the last query decides, with one voice for all heads of a layer.

Source: "Transformers are Multi-State RNNs" (arXiv 2401.06104). What differs: while decoding each head drops the token
with the least mean attention, by its own score, where the paper takes the last query alone, averaged over heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from siftkv.policies.base import PromptView
from siftkv.policies.budgets import HeldBudget, best, tiers_of
from siftkv.policies.importance import observation_rows
from siftkv.policies.scores import last_attention


@dataclass(frozen=True)
class TOVA(HeldBudget):
    """Of a prompt, the tokens with the most attention from its last query, averaged over all heads of the layer. While
    decoding, the weakest token makes room.

    ratio, budget, length, format, window, sinks, interval: see `siftkv.policies.budgets.HeldBudget`. The paper keeps
        neither a window nor sinks; the newest token always stays.
    """

    name: ClassVar[str] = "tova"

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        return observation_rows(length, 1)

    def classify(self, prompt: PromptView) -> Tensor:
        score = last_attention(prompt, 1).mean((1, 2))[:, None].expand(prompt.score.shape)
        count = max(0, self.held(prompt.length) - self.window - self.sinks)
        return tiers_of(best(score, prompt.protected, count))
