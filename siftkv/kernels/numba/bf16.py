"""Rounding sixteen fp32 lanes to bf16: to nearest even, as PyTorch does.

NaN stays NaN where it comes from bf16 numbers, whose lower bits are clear, or from arithmetic: neither pattern carries
over in the addition that rounds.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.core.extending import intrinsic

from siftkv.kernels.numba.vectors import F32, I16, I32, address, constant, lanes_of, vector


def _nearest(builder: Any, x: Any) -> Any:
    """bf16 patterns in 32-bit lanes."""
    bits = builder.bitcast(x, lanes_of(I32))
    upper = builder.lshr(bits, constant(I32, 16))
    odd = builder.and_(upper, constant(I32, 1))
    return builder.lshr(builder.add(bits, builder.add(odd, constant(I32, 0x7FFF))), constant(I32, 16))


@intrinsic
def store_bf16(typing, array, index, value):
    """Round sixteen numbers and write them to a uint16 array."""

    def code(context, builder, signature, args):
        bits = builder.trunc(_nearest(builder, args[2]), lanes_of(I16))
        builder.store(bits, address(context, builder, array, args[0], args[1], I16), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), code


@intrinsic
def nearest_bf16(typing, value):
    """The bf16 numbers nearest to sixteen fp32 ones, as fp32."""

    def code(context, builder, signature, args):
        return builder.bitcast(builder.shl(_nearest(builder, args[0]), constant(I32, 16)), lanes_of(F32))

    return vector(vector), code
