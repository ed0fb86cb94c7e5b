"""Scalar conversions between fp32, fp16, bf16 and stored scores, bit for bit those of the reference."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from siftkv.kernels.numba.compile import inner
from siftkv.kernels.numba.views import BF16, FP16

_DOWN, _UP = np.float32(2.0**-112), np.float32(2.0**112)
_SCORE = np.float32(2.0**15)
_HALF_MAX_BITS = np.int32(0x7BFF)


@intrinsic
def float_bits(typing, x):
    """The bit pattern of an fp32 number, int32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@intrinsic
def bits_float(typing, x):
    """The fp32 number with an int32 bit pattern."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@inner
def half_from_bits(bits):
    """fp32 value of a non-negative finite fp16 bit pattern."""
    return bits_float(np.int32(bits << 13)) * _UP


@inner
def half_bits_toward_zero(x):
    """fp16 bit pattern of non-negative fp32 `x`, rounded towards zero, saturating."""
    return min(np.int32(float_bits(np.float32(x * _DOWN)) >> 13), _HALF_MAX_BITS)


@inner
def half_up(x):
    """Bit pattern of the smallest fp16 number that is at least the non-negative `x`, saturating."""
    bits = half_bits_toward_zero(x)
    if half_from_bits(bits) < x:
        bits = np.int32(bits + 1)
    return min(bits, _HALF_MAX_BITS)


@inner
def half_down_signed(x):
    """Bit pattern (sign included) of the largest fp16 number that is at most `x`, magnitude saturating."""
    if x < 0:
        return np.int32(half_up(-x) | 0x8000)
    return half_bits_toward_zero(abs(x))


@inner
def half_value(bits):
    """fp32 of any fp16 bit pattern."""
    magnitude = bits & 0x7FFF
    if magnitude >= 0x7C00:
        value = bits_float(np.int32((magnitude << 13) | 0x7F800000))
    else:
        value = half_from_bits(magnitude)
    return -value if bits & 0x8000 else value


@inner
def dense_value(kind, bits):
    """fp32 of a bf16 or fp16 bit pattern (uint16)."""
    if kind == BF16:
        return bits_float(np.int32(np.int64(bits) << 16))
    return half_value(np.int64(bits))


@inner
def dense_bits(kind, x):
    """bf16 or fp16 bit pattern (uint16) of fp32 `x`, rounded to nearest even as PyTorch does."""
    raw = np.int64(float_bits(x)) & 0xFFFFFFFF
    sign, magnitude = (raw >> 16) & 0x8000, raw & 0x7FFFFFFF
    if kind == FP16:
        if magnitude > 0x7F800000:
            return np.uint16(sign | 0x7E00)
        if magnitude >= 0x477FF000:
            return np.uint16(sign | 0x7C00)
        scaled = np.int64(float_bits(np.float32(abs(x) * _DOWN)))
        if magnitude < 0x38800000:
            # Adding 0.5 puts fp16's subnormal unit at the last bit of the sum, so the addition rounds.
            return np.uint16(sign | (np.int64(float_bits(np.float32(abs(x) + np.float32(0.5)))) - 0x3F000000))
        return np.uint16(sign | ((scaled + 0xFFF + ((scaled >> 13) & 1)) >> 13))
    if magnitude > 0x7F800000:
        return np.uint16(0x7FC0)
    return np.uint16(((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16) & 0xFFFF)


@inner
def score_bits(score):
    """Stored form of a mean attention, rounded to nearest even."""
    x = min(max(score, np.float32(0)), np.float32(1)) * _SCORE
    bits = np.int64(float_bits(np.float32(x * _DOWN)))
    return np.uint16((bits + 0xFFF + ((bits >> 13) & 1)) >> 13)


@inner
def score_from_bits(bits):
    """Mean attention of a stored score."""
    return half_from_bits(np.int64(bits) & 0xFFFF) / _SCORE


@inner
def stochastic_score_bits(score, position, now):
    """Stored form of a score, rounded up or down by a hash of the token's position and the query's."""
    mask = 0xFFFFFFFF
    h = (position * 0x9E3779B1 & mask) ^ (now * 0x85EBCA77 & mask)
    h = (h ^ (h >> 15)) * 0x2C1B3C6D & mask
    noise = (h ^ (h >> 12)) >> 7 & 0x1FFF
    x = min(max(score, np.float32(0)), np.float32(1)) * _SCORE * _DOWN
    return np.uint16((np.int64(float_bits(np.float32(x))) + noise) >> 13)
