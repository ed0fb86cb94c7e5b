"""The levels of codes of one or two bits, to the bit as `siftkv.kernels.reference.fit` finds them."""

from __future__ import annotations

import numpy as np

from siftkv.kernels.numba.compile import inner
from siftkv.kernels.numba.vectors import (
    LANES,
    add16,
    div16,
    keep16,
    lanes_sum,
    load16,
    max16,
    min16,
    mul16,
    round16,
    splat16,
    sub16,
)
from siftkv.kernels.reference.fit import LARGEST_ZERO, NORMAL_STEP

_LARGEST_ZERO = np.float32(LARGEST_ZERO)
_STEP_OF_ONE_BIT, _STEP_OF_TWO = np.float32(NORMAL_STEP[1]), np.float32(NORMAL_STEP[2])


@inner
def _sum(x, low, high, mean, squares):
    """Sum of `x - mean` over `[low, high)`, or of its square: lane `c % 32` first, so even and odd vectors apart."""
    even, odd, means = splat16(np.float32(0)), splat16(np.float32(0)), splat16(mean)
    for c in range(low // LANES * LANES, high, LANES):
        here = keep16(sub16(load16(x, c), means), low - c, high - c)
        if squares:
            here = mul16(here, here)
        if c & LANES:
            odd = add16(odd, here)
        else:
            even = add16(even, here)
    return lanes_sum(add16(even, odd))


@inner
def _code_sums(x, low, high, mean, zero, scale, qmax):
    """Sums of codes, of their squares, and of their products with `x - mean`, over `[low, high)`."""
    nothing = splat16(np.float32(0))
    even, odd, total, square, most = nothing, nothing, nothing, nothing, splat16(np.float32(qmax))
    means, zeros, scales = splat16(mean), splat16(zero), splat16(scale)
    for c in range(low // LANES * LANES, high, LANES):
        here = load16(x, c)
        code = round16(min16(max16(div16(sub16(here, zeros), scales), nothing), most))
        code = keep16(code, low - c, high - c)
        product = keep16(mul16(sub16(here, means), code), low - c, high - c)
        total, square = add16(total, code), add16(square, mul16(code, code))
        if c & LANES:
            odd = add16(odd, product)
        else:
            even = add16(even, product)
    return lanes_sum(total), lanes_sum(square), lanes_sum(add16(even, odd))


@inner
def fit(x, low, high, least, most, bits):
    """Levels of `x[low:high]`, whose extremes are `least` and `most`; `x` has a vector's room behind it.

    Returns what the lowest and the highest code should stand for, whether these were fitted, and then the zero-point
    and scale that codes are computed against.
    """
    qmax, n = np.float32((1 << bits) - 1), np.float32(high - low)
    mean = _sum(x, low, high, np.float32(0), False) / n
    square = _sum(x, low, high, mean, True)
    step = (most - least) / qmax
    scale = min(np.float32(np.sqrt(square / n)) * (_STEP_OF_ONE_BIT if bits == 1 else _STEP_OF_TWO), step)
    zero, spread = mean - scale * (qmax / np.float32(2)), np.float32(0)
    coded = (zero, scale)
    for turn in range(2):
        if not scale > 0:
            return least, most, False, coded
        coded = (zero, scale)
        total, squares, product = _code_sums(x, low, high, mean, zero, scale, qmax)
        spread = squares * n - total * total
        if not (spread > 0 and product > 0):
            return least, most, False, coded
        scale = product * n / spread if turn == 0 else square / product
        zero = mean - scale * total / n
    if not scale * scale * spread / n - square <= step * n * step / np.float32(12):
        return least, most, False, coded
    if not abs(zero) <= _LARGEST_ZERO:
        return least, most, False, coded
    return zero, zero + scale * qmax, True, coded
