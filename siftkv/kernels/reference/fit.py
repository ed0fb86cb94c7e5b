"""Which levels codes stand for: between the extremes of a group or, with one or two bits, fitted to all of its values.

A fit is one step of Lloyd's iteration (Lloyd 1982, least squares quantisation in PCM) from the optimal uniform
quantiser of a normal distribution (Max 1960, quantizing for minimum distortion). Least squares would shrink what is
decoded, and a mean over many tokens does not average that out. So the scale that is stored makes the decoded values
project onto the values with factor one, `<x' - m, x - m> = |x - m|^2`: the error is a little larger and has no bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FITTED_BITS = 2
"""Codes of at most this many bits are fitted."""

NORMAL_STEP = {1: 1.596, 2: 0.9957}
"""Step of the best uniform quantiser of a normal distribution, in standard deviations, by bits (Max 1960, table 2)."""

LARGEST_ZERO = 65504.0
"""Largest zero-point, the end of fp16."""

_LANES = 32


def nearest_codes(x: Tensor, zero: Tensor, scale: Tensor, qmax: int) -> Tensor:
    """`round((x - zero) / scale)` within `[0, qmax]`, fp32; 0 where the scale is."""
    positive = scale > 0
    ratio = torch.where(positive, (x - zero) / torch.where(positive, scale, 1.0), torch.zeros((), device=x.device))
    return ratio.round().clamp(0, qmax)


def lane_sum(x: Tensor) -> Tensor:
    """Sum over the channels of each group, `[..., groups, n]` to `[..., groups]`, in the order of every kernel body:
    channel `c` of a head adds to lane `c % 32`, in order, and lanes are added in halves.
    """
    groups, width = x.shape[-2:]
    first = torch.arange(groups, device=x.device) * width % _LANES
    rows = -(-(_LANES - 1 + width) // _LANES)
    place = first[:, None] + torch.arange(width, device=x.device)
    laid = x.new_zeros(*x.shape[:-1], rows * _LANES).scatter_(-1, place.expand_as(x), x)
    total = x.new_zeros(*x.shape[:-1], _LANES)
    for row in laid.unflatten(-1, (rows, _LANES)).unbind(-2):
        total = total + row
    while total.shape[-1] > 1:
        low, high = total.chunk(2, -1)
        total = low + high
    return total[..., 0]


@dataclass
class Levels:
    """low, high: fp32 `[..., groups]`, what the lowest and the highest code of each group should stand for.

    codes: fp32 `[..., groups, n]`, codes that were fitted together with these levels, which count where `fitted` (bool
    `[..., groups]`) is true. Other codes are the nearest for the metadata that is stored.
    """

    low: Tensor
    high: Tensor
    codes: Tensor
    fitted: Tensor


def levels_of(x: Tensor, bits: int) -> Levels:
    """Levels of the groups of `x` fp32 `[..., groups, n]`."""
    low, high = x.amin(-1), x.amax(-1)
    if bits > FITTED_BITS:
        return Levels(low, high, x, torch.zeros_like(low, dtype=torch.bool))
    return _fit(x, low, high, bits)


def _fit(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Levels:
    """A group keeps its extremes where a fit has nothing to go by (constants), where its error is above what rounding
    to the steps between the extremes is expected to cost, `step^2 / 12` a value (few values far from all others), or
    where fp16 does not hold its zero-point.
    """
    qmax, n = 2**bits - 1, x.shape[-1]
    mean = lane_sum(x) / n
    deviation = x - mean[..., None]
    square = lane_sum(deviation * deviation)
    step = (high - low) / qmax
    scale = torch.minimum((square / n).sqrt() * NORMAL_STEP[bits], step)
    zero = mean - scale * (qmax / 2)
    codes, spread, fits = x, square, torch.ones_like(mean, dtype=torch.bool)
    for turn in range(2):
        codes = nearest_codes(x, zero[..., None], scale[..., None], qmax)
        total, product = codes.sum(-1), lane_sum(deviation * codes)
        spread = (codes * codes).sum(-1) * n - total * total
        fits &= (spread > 0) & (product > 0)
        scale = product * n / spread if turn == 0 else square / product
        zero = mean - scale * total / n
    error = scale * scale * spread / n - square
    fits &= (error <= step * n * step / 12) & (zero.abs() <= LARGEST_ZERO)
    return Levels(torch.where(fits, zero, low), torch.where(fits, zero + scale * qmax, high), codes, fits)
