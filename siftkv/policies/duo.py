"""`duo`: heads that retrieve keep everything, streaming heads keep sinks and recent tokens.

Source: "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads" (arXiv 2410.10819). The
paper learns a score a head by optimisation on passkey texts; such scores are read from a file. What differs: without a
file heads are measured on the prompt itself, layer by layer, and then all of them keep what is decoded; prompts
see full attention in every head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier
from siftkv.policies.base import UNLIMITED, DecodeRule, Policy, PromptView, check_window
from siftkv.policies.budgets import check_format, format_of, keep_all, tiers_of
from siftkv.policies.duo_heads import checked_scores, read_scores, retrieving, retrieving_in_prompt

MEASURED = "prompt"


@dataclass(frozen=True, eq=False)
class DuoAttention(Policy):
    """The `sparsity` share of heads that retrieve least keep `sinks` first and `window` last tokens, others everything.

    sparsity: share of streaming heads. heads: a JSON file of scores, one a layer and kv head (`[[...], ...]`, or under
        `scores`); from Python such a list itself; `prompt` = measured on each prompt, the share then counts a layer.
    format: of what retrieving heads keep beyond window and sinks, `dense` = the model's own.
    """

    name: ClassVar[str] = "duo"

    sparsity: float = 0.5
    heads: str | Sequence[Sequence[float]] = MEASURED
    format: str = "dense"
    window: int = 256
    sinks: int = 128

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        check_format(self.format)
        if isinstance(self.sparsity, bool) or not 0 <= self.sparsity <= 1:
            raise PolicyError(f"sparsity={self.sparsity!r}: use a share between 0 and 1")
        if not isinstance(self.heads, str):
            try:
                object.__setattr__(self, "heads", checked_scores(self.heads))
            except (ValueError, TypeError):
                raise PolicyError("heads must be a list of numbers for each layer, one a kv head") from None
        object.__setattr__(self, "_retrieves", self._read())

    def _read(self) -> Tensor | None:
        if self.heads == MEASURED:
            return None
        scores = read_scores(self.heads) if isinstance(self.heads, str) else checked_scores(self.heads)
        return retrieving(scores, self.sparsity)

    @property
    def retrieves(self) -> Tensor | None:
        """Bool `[L, H]`: heads that keep everything; None where they are measured on each prompt."""
        known: Tensor | None = vars(self)["_retrieves"]
        return known

    def __repr__(self) -> str:
        known = self.retrieves
        return f"{self.describe()} of {self.heads}, retrieving: {None if known is None else known.int().tolist()}"

    def __eq__(self, other: object) -> bool:
        """A file of scores that has changed makes another policy."""
        return isinstance(other, DuoAttention) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(format_of(self.format, dense), scores=False, positions=False),)

    def classify(self, prompt: PromptView) -> Tensor:
        known = self.retrieves
        if known is None:
            keep = retrieving_in_prompt(prompt, self.window, self.sinks, self.sparsity)
        else:
            keep = known[prompt.layer].to(prompt.score.device, non_blocking=True).expand(prompt.score.shape[:2])
        return tiers_of(keep[..., None].expand(prompt.score.shape))

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        known = self.retrieves
        if known is None:
            return keep_all(num_layers, num_kv_heads)
        if known.shape != (num_layers, num_kv_heads):
            raise PolicyError(
                f"heads has {tuple(known.shape)} scores: this model has {num_layers} layers of {num_kv_heads} kv heads"
            )
        cap = torch.where(known, UNLIMITED, 0)[..., None]
        return DecodeRule(torch.zeros(cap.shape), cap)
