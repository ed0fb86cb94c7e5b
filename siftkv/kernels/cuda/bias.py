"""Tables by which attention adds back what conditioning took out of keys (`src/bias.cuh`)."""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.kernels.state import Conditioning
from siftkv.kernels.turns import exact_turns

NEAR = 128
"""Positions that tokens may lie behind an anchor."""


def bias_blocks(c: Conditioning) -> int:
    """Blocks of 8 rotary pairs that the head with most of them keeps."""
    return -(-c.pairs.shape[-1] // 8) if c.has_bias else 0


def turn_rows(c: Conditioning) -> int:
    """Rows of a head's `turns`: distances below `NEAR`, then positions that are multiples of it."""
    return NEAR + -(-c.cos.shape[0] // NEAR)


def bias_tables(c: Conditioning) -> dict[str, Tensor]:
    """`trig` of `src/state.cuh` and, where turns are steady, `near` and `turns`."""
    tables = {"trig": _parts(torch.stack([c.cos, c.sin], -1), -2)}
    if c.rates is not None:
        low = _of_heads(c, *exact_turns(c.rates, 1.0, NEAR))
        high = _of_heads(c, *exact_turns(c.rates * NEAR, float(c.cos[0].mean()), turn_rows(c) - NEAR))
        tables |= {"near": _parts(low, -3), "turns": torch.cat([low, high], 2)}
    return tables


def _of_heads(c: Conditioning, cos: Tensor, sin: Tensor) -> Tensor:
    """A table fp32 `[rows, D/2]` twice of the pairs that each head keeps: `[L, H, rows, blocks, 4, 2, 2]`, where lane t
    of a block of 8 pairs has cos and sin of pairs t and 4 + t.
    """
    blocks = bias_blocks(c)
    pairs = torch.nn.functional.pad(c.pairs.long(), (0, 8 * blocks - c.pairs.shape[-1]))
    chosen = torch.stack([cos, sin], -1)[:, pairs].permute(1, 2, 0, 3, 4)  # [L, H, rows, 8 blocks, 2]
    return chosen.unflatten(3, (blocks, 2, 4)).transpose(4, 5).contiguous()


def _parts(table: Tensor, dim: int) -> Tensor:
    """The nearest fp16 numbers, then what their rounding left, along a new dimension."""
    high = table.half()
    return torch.stack([high, (table - high.float()).half()], dim).contiguous()
