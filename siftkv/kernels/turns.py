"""Rotary tables whose rows are multiples of one turn a pair, so that kernels may add angles: row p + n is row p turned
by n.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_APART = 0.02
"""Radians, about: how far a table may lie from multiples of one angle. Angles rounded to fp32 are 0.004 off at position
131,071; those of dynamic NTK, whose turns depend on the position, are radians off.
"""


def turn_rates(cos: Tensor, sin: Tensor) -> Tensor | None:
    """Radians a position, fp64 `[P]`, of a rotary table fp32 `[positions, P]`; None where its turns are not steady."""
    x, y = cos.double(), sin.double()
    last = cos.shape[0] - 1
    if last < 1:
        return torch.zeros_like(x[0])
    rates, step = torch.atan2(y[1], x[1]), 2
    # An angle is known up to whole turns, which the rate found so far decides: it is good for twice the distance.
    while step // 2 < last:
        row = min(step, last)
        angle = torch.atan2(y[row], x[row])
        rates = (angle + 2 * torch.pi * ((rates * row - angle) / (2 * torch.pi)).round()) / row
        step *= 2
    exact = exact_turns(rates, float(x[0].mean()), cos.shape[0])
    apart = max(float((table - other).abs().max()) for table, other in zip(exact, (cos, sin), strict=True))
    return rates if apart <= _MOST_APART * max(1.0, float(x[0].mean())) else None


def exact_turns(rates: Tensor, size: float, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 `[positions, P]` times `size`, of every position times `rates` fp64 `[P]`."""
    angle = torch.arange(positions, device=rates.device, dtype=torch.float64)[:, None] * rates
    return (size * angle.cos()).float(), (size * angle.sin()).float()
