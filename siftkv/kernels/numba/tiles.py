"""Bringing a block of tokens into an fp32 tile, and the inner products over tiles.

A tile row is `ld` floats apart from the next, `ld` a multiple of 16; whatever stands beyond the last channel is
finite, and meets zeros in the queries.
"""

from __future__ import annotations

import numpy as np

from siftkv.kernels.numba.bits import dense_value, half_from_bits, half_value
from siftkv.kernels.numba.compile import inner
from siftkv.kernels.numba.vectors import (
    LANES,
    load_bf16,
    load_codes16,
    load_fp16,
    load_fp16_pairs,
    prefetch,
    store16,
)
from siftkv.kernels.numba.views import BF16, FP16

_LINE = 64


@inner
def padded(n):
    """`n` rounded up to whole vectors."""
    return (n + LANES - 1) // LANES * LANES


@inner
def prefetch_bytes(pool8, at, size):
    for byte in range(at, at + size, _LINE):
        prefetch(pool8, byte)


@inner
def unpack_codes(tile, at, codes, start, row, bits):
    """One token-major row of codes to fp32: plane after plane, so that what a short plane writes too far is
    overwritten.
    """
    mask = np.int32((1 << bits) - 1)
    for plane in range(8 // bits):
        shift, target = np.int32(plane * bits), at + plane * row
        for byte in range(0, row, LANES):
            store16(tile, target + byte, load_codes16(codes, start + byte, shift, mask))


@inner
def unpack_dense(tile, at, kind, words, floats, element, dim):
    """One dense row, `element` elements into its pool, to fp32."""
    whole = dim // LANES * LANES
    if kind == BF16:
        for c in range(0, whole, LANES):
            store16(tile, at + c, load_bf16(words, element + c))
    elif kind == FP16:
        for c in range(0, whole, LANES):
            store16(tile, at + c, load_fp16(words, element + c))
    else:
        for c in range(dim):
            tile[at + c] = floats[element + c]
        return
    for c in range(whole, dim):
        tile[at + c] = dense_value(kind, words[element + c])


@inner
def unpack_meta(scale, zero, words32, start, count):
    """fp16 pairs (scale, zero-point) from the `start`-th 32-bit word on, to fp32; both are written up to a whole
    vector.
    """
    for i in range(0, count, LANES):
        store16(scale, i, load_fp16_pairs(words32, start + i, np.int32(0)))
        store16(zero, i, load_fp16_pairs(words32, start + i, np.int32(16)))


@inner
def unpack_meta_exact(scale, zero, words16, start, count):
    """As `unpack_meta`, one by one, for metadata that may be followed by the end of the pool."""
    for i in range(count):
        scale[i] = half_value(np.int64(words16[start + 2 * i]))
        zero[i] = half_value(np.int64(words16[start + 2 * i + 1]))


@inner
def compact_pair(scale_byte, centre_byte, bits):
    """fp32 (scale, zero) of one-byte metadata."""
    qmax = (1 << bits) - 1
    scale = half_from_bits(np.int64(scale_byte) << 7)
    centre = np.float32(np.int8(centre_byte))
    return scale, scale * (centre * np.float32(qmax / 254) - np.float32(qmax / 2))


@inner
def unpack_compact(scale, zero, pool8, start, count, bits):
    for i in range(count):
        scale[i], zero[i] = compact_pair(pool8[start + 2 * i], pool8[start + 2 * i + 1], bits)
