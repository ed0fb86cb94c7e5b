"""Tables by which attention adds back what conditioning took out of keys (`src/bias.cuh`)."""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.kernels.state import Conditioning
from siftkv.kernels.turns import exact_turns

NEAR = 256
"""Distances from an anchor that have a row of factors."""

TURNS = 256
"""A position's turn is that of its remainder by this and that of the multiple below."""


def bias_blocks(c: Conditioning) -> int:
    """Blocks of 8 rotary pairs that the head with most of them keeps."""
    return -(-c.pairs.shape[-1] // 8) if c.has_bias else 0


def turn_rows(c: Conditioning) -> int:
    """Rows of a head's `turns`: positions below `TURNS`, then multiples of it."""
    return TURNS + -(-c.cos.shape[0] // TURNS)


def bias_tables(c: Conditioning, run_rows: int) -> dict[str, Tensor]:
    """`trig` of `src/state.cuh` and, where turns are steady, `near`, `runs` and `turns`, and biases times the size of
    the rotary tables, which these have not. run_rows: positions that `runs` has, a multiple of 16.
    """
    if c.rates is None:
        return {"trig": _parts(torch.stack([c.cos, c.sin], -1))}
    trig = torch.stack(exact_turns(c.rates, 1.0, c.cos.shape[0]), -1)
    low = _of_heads(c, *exact_turns(c.rates, 1.0, TURNS))
    high = _of_heads(c, *exact_turns(c.rates * TURNS, 1.0, turn_rows(c) - TURNS))
    near = _parts(_of_heads(c, *exact_turns(c.rates, 1.0, NEAR)))
    return {
        "bias": c.bias * c.cos[0].mean(),
        "trig": _parts(trig),
        "near": near,
        "turns": torch.cat([low, high], 2),
        "runs": _runs(near[:, :, :run_rows], low[:, :, 16 : run_rows + 1 : 16]),
    }


def _runs(near: Tensor, steps: Tensor) -> Tensor:
    """Rows of `near` and some of `turns` as bytes `[L, H, n]`: operands of two tokens and two pairs a lane, high parts
    before what rounding left, block by block; then the turns.
    """
    operands = near.unflatten(2, (-1, 2)).permute(0, 1, 4, 7, 2, 5, 6, 3, 8)
    return torch.cat([x.contiguous().flatten(2).view(torch.uint8) for x in (operands, steps)], 2)


def _of_heads(c: Conditioning, cos: Tensor, sin: Tensor) -> Tensor:
    """A table fp32 `[rows, D/2]` twice of the pairs that each head keeps: `[L, H, rows, blocks, 4, 2, 2]`, where lane t
    of a block of 8 pairs has cos and sin of pairs t and 4 + t.
    """
    blocks = bias_blocks(c)
    pairs = torch.nn.functional.pad(c.pairs.long(), (0, 8 * blocks - c.pairs.shape[-1]))
    chosen = torch.stack([cos, sin], -1)[:, pairs].permute(1, 2, 0, 3, 4)  # [L, H, rows, 8 blocks, 2]
    return chosen.unflatten(3, (blocks, 2, 4)).transpose(4, 5).contiguous()


def _parts(table: Tensor) -> Tensor:
    """`[..., 2]`: the nearest fp16 numbers, then what their rounding left: `[..., 2, 2]`."""
    high = table.half()
    return torch.stack([high, (table - high.float()).half()], -2).contiguous()
