"""Which heads retrieve: reading DuoAttention's scores from a file, and measuring them on a prompt."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.policies.base import PromptView
from siftkv.policies.scores import last_attention

LAST_QUERIES = 64
"""Last queries of a prompt that heads are measured by."""

_MOST_BYTES = 1 << 24
"""Largest file that is read."""

HeadScores = tuple[tuple[float, ...], ...]
"""A score a layer and kv head, larger = rather retrieves."""


def read_scores(file: str) -> HeadScores:
    """Scores of a JSON file: a list of layers, each a list of numbers, or an object that holds it under `scores`.

    Raises PolicyError for a file that is not there or holds something else.
    """
    path = Path(file)
    try:
        status = path.stat()
        if status.st_size > _MOST_BYTES:
            raise ValueError("too large")
        return _read(path, status.st_mtime_ns)
    except (OSError, ValueError, TypeError, KeyError):
        raise PolicyError(
            f"heads={file!r} is not a JSON file with a list of numbers for each layer, one a kv head"
        ) from None


@lru_cache(maxsize=16)
def _read(path: Path, modified: int) -> HeadScores:
    found = json.loads(path.read_text())
    return checked_scores(found["scores"] if isinstance(found, dict) else found)


def checked_scores(scores: object) -> HeadScores:
    """Scores as floats. Raises ValueError or TypeError unless every layer has as many, all of them finite."""
    value = torch.tensor(scores, dtype=torch.float64)
    if value.ndim != 2 or not value.numel() or not bool(torch.isfinite(value).all()):
        raise ValueError("not one number a layer and head")
    return tuple(tuple(row) for row in value.tolist())


def retrieving(scores: HeadScores, sparsity: float) -> Tensor:
    """Bool `[L, H]`: heads that keep everything; the `sparsity` share of all heads with the lowest scores do not."""
    value = torch.tensor(scores, dtype=torch.float64)
    return _above(value.flatten(), sparsity).view(value.shape)


def retrieving_in_prompt(prompt: PromptView, window: int, sinks: int, sparsity: float) -> Tensor:
    """Bool `[R, H]`: the same within one layer, by the share of its last queries' attention that a head's query heads
    give to tokens between sinks and window.
    """
    attention = last_attention(prompt, LAST_QUERIES).mean(2)
    far = attention[..., sinks : max(sinks, prompt.length - window)].sum(-1)
    return _above(far, sparsity)


def _above(score: Tensor, sparsity: float) -> Tensor:
    """Bool like `score`: false for the `sparsity` share with the lowest, the first of equals before others."""
    count = score.shape[-1]
    place = torch.arange(count, device=score.device).expand(score.shape)
    order = score.argsort(dim=-1, stable=True)
    return torch.empty_like(order).scatter_(-1, order, place) >= round(sparsity * count)
