"""Sixteen fp32 lanes as a numba value, so that kernels say exactly what is vectorised.

LLVM lowers the vectors to whatever the CPU has (one AVX-512 register, two AVX2 ones, four NEON ones). Nothing here is
checked for bounds: an
operation at index `i` touches elements `i` to `i + 15`. No operation may be contracted or reordered, so arithmetic is
IEEE and reproducible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.extending import intrinsic, register_model
from numba.np.arrayobj import make_array

LANES = 16
F32, I32, I16, I8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)


class Vector(types.Type):
    """Sixteen fp32 numbers."""

    def __init__(self) -> None:
        super().__init__("vector16")


vector = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """The LLVM form of a `Vector`."""

    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(F32, LANES))


def lanes_of(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def constant(element: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(lanes_of(element), [value] * LANES)


def splat(builder: Any, scalar: Any) -> Any:
    start = ir.Constant(lanes_of(scalar.type), ir.Undefined)
    first = builder.insert_element(start, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, start, ir.Constant(lanes_of(I32), [0] * LANES))


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: ir.Type | None = None) -> Any:
    pointer = builder.gep(make_array(array_type)(context, builder, array).data, [index])
    return pointer if element is None else builder.bitcast(pointer, lanes_of(element).as_pointer())


def load(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: ir.Type) -> Any:
    return builder.load(address(context, builder, array_type, array, index, element), align=1)


def _call(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def _operation(arity: int, emit: Callable[..., Any], result: Any = vector) -> Any:
    """An intrinsic of `arity` vectors (at most three)."""

    def typed(emit: Callable[..., Any]) -> Callable[..., Any]:
        return lambda context, builder, signature, args: emit(builder, *args)

    code = typed(emit)
    if arity == 1:

        @intrinsic
        def one(typing, a):
            return result(vector), code

        return one
    if arity == 2:

        @intrinsic
        def two(typing, a, b):
            return result(vector, vector), code

        return two

    @intrinsic
    def three(typing, a, b, c):
        return result(vector, vector, vector), code

    return three


def _select(builder: Any, order: str, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(order, a, b), a, b)


def _reduce(kind: str) -> Callable[[Any, Any], Any]:
    """Pairwise halving, so that the order of additions is fixed."""

    def emit(builder: Any, v: Any) -> Any:
        width = LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(v.type, ir.Undefined)
            low, high = (
                builder.shuffle_vector(
                    v, undefined, ir.Constant(ir.VectorType(I32, width), list(range(at, at + width)))
                )
                for at in (0, width)
            )
            v = builder.fadd(low, high) if kind == "sum" else _select(builder, ">" if kind == "max" else "<", low, high)
        return builder.extract_element(v, ir.Constant(I32, 0))

    return emit


def _exp2(builder: Any, x: Any) -> Any:
    """`2 ** x` for x up to 0 (2 ** -100 below that, far from the subnormals, which are slow, NaN of NaN), relative
    error under 2e-7: round to an integer, polynomial for the rest, add to the exponent.
    """
    lowest = constant(F32, -100.0)
    x = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    magic = constant(F32, 12582912.0)
    shifted = builder.fadd(x, magic)
    rest = builder.fsub(x, builder.fsub(shifted, magic))
    value = constant(F32, _EXP2[0])
    for coefficient in _EXP2[1:]:
        value = multiply_add(builder, value, rest, constant(F32, coefficient))
    exponent = builder.shl(builder.bitcast(shifted, lanes_of(I32)), constant(I32, 23))
    return builder.bitcast(builder.add(builder.bitcast(value, lanes_of(I32)), exponent), lanes_of(F32))


_EXP2 = [
    1.5353362e-4,
    1.33988693e-3,
    9.61843736e-3,
    5.55033247e-2,
    2.40226479e-1,
    6.93147203e-1,
    1.0,
]


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", lanes_of(F32), [a, b, c])


def _rounded(builder: Any, x: Any) -> Any:
    magic = constant(F32, 12582912.0)
    return builder.fsub(builder.fadd(x, magic), magic)


add16 = _operation(2, lambda builder, a, b: builder.fadd(a, b))
sub16 = _operation(2, lambda builder, a, b: builder.fsub(a, b))
mul16 = _operation(2, lambda builder, a, b: builder.fmul(a, b))
div16 = _operation(2, lambda builder, a, b: builder.fdiv(a, b))
min16 = _operation(2, lambda builder, a, b: _select(builder, "<", a, b))
max16 = _operation(2, lambda builder, a, b: _select(builder, ">", a, b))
fma16 = _operation(3, multiply_add)
exp2_16 = _operation(1, _exp2)
round16 = _operation(1, _rounded)
"""Half to even, for magnitudes below 2**22."""
lanes_sum = _operation(1, _reduce("sum"), types.float32)
lanes_max = _operation(1, _reduce("max"), types.float32)
lanes_min = _operation(1, _reduce("min"), types.float32)


@intrinsic
def splat16(typing, value):
    """The same fp32 number in every lane."""

    def code(context, builder, signature, args):
        return splat(builder, args[0])

    return vector(types.float32), code


@intrinsic
def keep16(typing, value, first, last):
    """Lanes `first` to `last - 1` of a vector, zero in the others."""

    def code(context, builder, signature, args):
        lane = ir.Constant(lanes_of(I32), list(range(LANES)))
        low, high = (splat(builder, builder.trunc(x, I32)) for x in args[1:])
        inside = builder.and_(builder.icmp_signed(">=", lane, low), builder.icmp_signed("<", lane, high))
        return builder.select(inside, args[0], constant(F32, 0.0))

    return vector(vector, types.intp, types.intp), code


@intrinsic
def load16(typing, array, index):
    """Sixteen elements of an fp32 array."""

    def code(context, builder, signature, args):
        return load(context, builder, array, args[0], args[1], F32)

    return vector(array, types.intp), code


@intrinsic
def store16(typing, array, index, value):
    """Write sixteen elements of an fp32 array."""

    def code(context, builder, signature, args):
        builder.store(args[2], address(context, builder, array, args[0], args[1], F32), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), code


@intrinsic
def load_codes16(typing, array, index, shift, mask):
    """`(byte >> shift) & mask` of sixteen bytes, as fp32."""

    def code(context, builder, signature, args):
        raw = builder.zext(load(context, builder, array, args[0], args[1], I8), lanes_of(I32))
        raw = builder.and_(builder.lshr(raw, splat(builder, args[2])), splat(builder, args[3]))
        return builder.sitofp(raw, lanes_of(F32))

    return vector(array, types.intp, types.int32, types.int32), code


def _half_value(builder: Any, bits: Any) -> Any:
    """fp32 of finite fp16 bit patterns in 32-bit lanes whose upper half is clear."""
    magnitude = builder.shl(builder.and_(bits, constant(I32, 0x7FFF)), constant(I32, 13))
    value = builder.fmul(builder.bitcast(magnitude, lanes_of(F32)), constant(F32, 2.0**112))
    sign = builder.shl(builder.and_(bits, constant(I32, 0x8000)), constant(I32, 16))
    return builder.bitcast(builder.or_(builder.bitcast(value, lanes_of(I32)), sign), lanes_of(F32))


@intrinsic
def load_bf16(typing, array, index):
    """Sixteen bf16 numbers of a uint16 array."""

    def code(context, builder, signature, args):
        raw = builder.zext(load(context, builder, array, args[0], args[1], I16), lanes_of(I32))
        return builder.bitcast(builder.shl(raw, constant(I32, 16)), lanes_of(F32))

    return vector(array, types.intp), code


@intrinsic
def load_fp16(typing, array, index):
    """Sixteen fp16 numbers of a uint16 array (finite ones)."""

    def code(context, builder, signature, args):
        return _half_value(builder, builder.zext(load(context, builder, array, args[0], args[1], I16), lanes_of(I32)))

    return vector(array, types.intp), code


@intrinsic
def load_fp16_pairs(typing, array, index, which):
    """The lower (`which` 0) or upper (16) fp16 of sixteen 32-bit words of an int32 array."""

    def code(context, builder, signature, args):
        raw = builder.lshr(load(context, builder, array, args[0], args[1], I32), splat(builder, args[2]))
        return _half_value(builder, builder.and_(raw, constant(I32, 0xFFFF)))

    return vector(array, types.intp, types.int32), code


@intrinsic
def prefetch(typing, array, index):
    """Ask for the cache line of an element ahead of its use."""

    def code(context, builder, signature, args):
        pointer = address(context, builder, array, args[0], args[1])
        byte = builder.bitcast(pointer, I8.as_pointer())
        hints = [ir.Constant(I32, x) for x in (0, 3, 1)]
        function = ir.FunctionType(ir.VoidType(), [byte.type, I32, I32, I32])
        builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0"), [byte, *hints])
        return context.get_dummy_value()

    return types.void(array, types.intp), code


@intrinsic
def fetch_add(typing, array, index, amount):
    """Add to an element of an int64 array, atomically; returns what stood there before."""

    def code(context, builder, signature, args):
        return builder.atomic_rmw("add", address(context, builder, array, args[0], args[1]), args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), code
