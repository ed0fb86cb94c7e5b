"""Which query rows of a prompt importance is measured from, and what each stands for."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

TAIL = 256
"""Last query rows that always count one by one: the most recent queries foretell the next ones best."""


@lru_cache(maxsize=32)  # every prompt of a length asks for the same
def sampled_rows(length: int, sample: int = 8, tail: int = TAIL) -> tuple[Tensor, Tensor]:
    """A fixed, position-hashed 1-in-`sample` choice of all query rows, plus all of the last `tail`: rows int64 and
    weights fp32 `[M]`.

    A sampled row stands for `sample` rows. `sample=1` is the exact mean over all later queries. The choice depends on
    positions only, so that a prompt gets the same scores alone, in a batch and in chunks.
    """
    position = torch.arange(length)
    mixed = (position * 0x9E3779B1 & 0xFFFFFFFF) * 0x85EBCA6B & 0xFFFFFFFF
    recent = position >= length - tail
    chosen = recent | ((mixed >> 16) % sample == 0)
    rows = position[chosen]
    return rows, torch.where(recent[chosen], 1.0, float(sample))


def observation_rows(length: int, observe: int) -> tuple[Tensor, Tensor]:
    """The last `observe` query rows, equally weighted (SnapKV's observation window)."""
    rows = torch.arange(max(0, length - observe), length)
    return rows, torch.ones(len(rows))
