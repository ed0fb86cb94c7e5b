"""Several prompts at once, for kernels that know one at a time."""

from __future__ import annotations

from torch import Tensor

from siftkv.kernels.numba.append import append_tokens
from siftkv.kernels.numba.prompt import prompt_importance
from siftkv.kernels.numba.window import write_window
from siftkv.kernels.prompts import PromptBatch, measure_one_by_one, store_one_by_one
from siftkv.kernels.state import CacheState


def measure_prompts(batch: PromptBatch, q: Tensor, k: Tensor, lse: Tensor | None = None) -> Tensor:
    """As `siftkv.kernels.reference.prompt.measure_prompts`."""
    return measure_one_by_one(prompt_importance, batch, q, k, lse)


def store_prompts(
    state: CacheState, layer: int, batch: PromptBatch, k: Tensor, v: Tensor, score: Tensor, tier: Tensor
) -> None:
    """As `siftkv.kernels.reference.prompt.store_prompts`."""
    store_one_by_one(write_window, append_tokens, state, layer, batch, k, v, score, tier)
