"""Inner products between query heads and codes as they stand in pages: every code is unpacked once, in registers, for
up to four query heads.

Written as LLVM vectors, because what decides here is how many of the sixteen to thirty-two vector registers hold
sums; see `vectors` for the conventions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic

from siftkv.kernels.numba.compile import inner
from siftkv.kernels.numba.vectors import (
    F32,
    I8,
    I16,
    I32,
    LANES,
    address,
    constant,
    lanes_of,
    load,
    multiply_add,
    splat,
)

FP32_ROWS, BF16_ROWS, CODES_8, CODES_4, CODES_2, CODE_PLANE = range(6)
"""How numbers stand in memory; `CODE_PLANE` is one plane of any code width, given by a shift and a mask."""

_PLANES = {CODES_4: 2, CODES_2: 4}
_TOKENS = 4
"""Rows of keys that share each load of the queries."""
_CHUNKS = 4
"""Vectors of a dense value row that are summed at once: with four query heads, sixteen registers of sums."""


def _raw(context: Any, builder: Any, array_type: Any, array: Any, at: Any, form: int) -> Any:
    if form == FP32_ROWS:
        return load(context, builder, array_type, array, at, F32)
    element = I16 if form == BF16_ROWS else I8
    return builder.zext(load(context, builder, array_type, array, at, element), lanes_of(I32))


def _number(builder: Any, raw: Any, form: int, plane: int, shift: Any, mask: Any) -> Any:
    """fp32 lanes of one plane of what `_raw` loaded."""
    if form == FP32_ROWS:
        return raw
    if form == BF16_ROWS:
        return builder.bitcast(builder.shl(raw, constant(I32, 16)), lanes_of(F32))
    if form == CODE_PLANE:
        raw = builder.and_(builder.lshr(raw, shift), mask)
    else:
        bits = 8 // _PLANES.get(form, 1)
        if plane:
            raw = builder.lshr(raw, constant(I32, plane * bits))
        if (plane + 1) * bits < 8:
            raw = builder.and_(raw, constant(I32, (1 << bits) - 1))
    return builder.sitofp(raw, lanes_of(F32))


def _pick(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _four_sums(builder: Any, rows: list[Any]) -> Any:
    """The sums of four vectors as one vector of four, halving all of them together."""
    low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    a, b = (builder.fadd(_pick(builder, x, y, low), _pick(builder, x, y, high)) for x, y in (rows[:2], rows[2:]))
    low = [i for i in range(32) if i % 8 < 4]
    v = builder.fadd(_pick(builder, a, b, low), _pick(builder, a, b, [i + 4 for i in low]))
    low = [i for i in range(16) if i % 4 < 2]
    v = builder.fadd(_pick(builder, v, v, low), _pick(builder, v, v, [i + 2 for i in low]))
    return builder.fadd(_pick(builder, v, v, [0, 2, 4, 6]), _pick(builder, v, v, [1, 3, 5, 7]))


def _key_rows(form: int, queries: int) -> Callable[..., Any]:
    planes = _PLANES.get(form, 1)

    @intrinsic
    def dot(typing, out, to, out_ld, source, at, stride, q, q_at, q_ld, row):
        def code(context, builder, signature, args):
            out_, to_, out_ld_, source_, at_, stride_, q_, q_at_, q_ld_, row_ = args
            sums = [
                [cgutils.alloca_once_value(builder, constant(F32, 0.0)) for _ in range(_TOKENS)] for _ in range(queries)
            ]
            starts = [builder.add(at_, builder.mul(stride_, ir.Constant(stride_.type, t))) for t in range(_TOKENS)]
            step = ir.Constant(row_.type, LANES)
            with cgutils.for_range_slice(builder, ir.Constant(row_.type, 0), row_, step, row_.type) as (i, _):
                raw = [_raw(context, builder, source, source_, builder.add(s, i), form) for s in starts]
                for plane in range(planes):
                    channel = builder.add(builder.add(q_at_, i), builder.mul(row_, ir.Constant(row_.type, plane)))
                    numbers = [_number(builder, x, form, plane, None, None) for x in raw]
                    for g in range(queries):
                        query = builder.add(channel, builder.mul(q_ld_, ir.Constant(q_ld_.type, g)))
                        lanes = load(context, builder, q, q_, query, F32)
                        for t in range(_TOKENS):
                            held = builder.load(sums[g][t])
                            builder.store(multiply_add(builder, numbers[t], lanes, held), sums[g][t])
            for g in range(queries):
                total = _four_sums(builder, [builder.load(x) for x in sums[g]])
                target = builder.add(to_, builder.mul(out_ld_, ir.Constant(out_ld_.type, g)))
                pointer = address(context, builder, out, out_, target)
                builder.store(total, builder.bitcast(pointer, total.type.as_pointer()), align=1)
            return context.get_dummy_value()

        index = types.intp
        return types.void(out, index, index, source, index, index, q, index, index, index), code

    return dot


def _value_row(form: int, queries: int) -> Callable[..., Any]:
    planes = _PLANES.get(form, 1)

    @intrinsic
    def accumulate(typing, sums, to, sums_ld, plane_ld, source, at, count, w, w_at, w_ld, shift, mask):
        def code(context, builder, signature, args):
            sums_, to_, sums_ld_, plane_ld_, source_, at_, count_, w_, w_at_, w_ld_, shift_, mask_ = args
            shifts, masks = splat(builder, shift_), splat(builder, mask_)

            def place(g: int, plane: int) -> Any:
                far = builder.add(
                    builder.mul(sums_ld_, ir.Constant(to_.type, g)),
                    builder.mul(plane_ld_, ir.Constant(to_.type, plane)),
                )
                return address(context, builder, sums, sums_, builder.add(to_, far), F32)

            held = [
                [cgutils.alloca_once_value(builder, builder.load(place(g, p), align=1)) for p in range(planes)]
                for g in range(queries)
            ]
            step = ir.Constant(count_.type, LANES)
            with cgutils.for_range_slice(builder, ir.Constant(count_.type, 0), count_, step, count_.type) as (i, _):
                raw = _raw(context, builder, source, source_, builder.add(at_, i), form)
                first = builder.add(w_at_, i)
                weights = [
                    load(
                        context, builder, w, w_, builder.add(first, builder.mul(w_ld_, ir.Constant(first.type, g))), F32
                    )
                    for g in range(queries)
                ]
                for plane in range(planes):
                    numbers = _number(builder, raw, form, plane, shifts, masks)
                    for g in range(queries):
                        total = multiply_add(builder, numbers, weights[g], builder.load(held[g][plane]))
                        builder.store(total, held[g][plane])
            for g in range(queries):
                for plane in range(planes):
                    builder.store(builder.load(held[g][plane]), place(g, plane), align=1)
            return context.get_dummy_value()

        index = types.intp
        arguments = (sums, index, index, index, source, index, index, w, index, index, types.int32, types.int32)
        return types.void(*arguments), code

    return accumulate


def _value_rows(form: int, queries: int, chunks: int) -> Callable[..., Any]:
    @intrinsic
    def accumulate(typing, out, to, out_ld, source, at, stride, count, w, w_at, w_ld):
        def code(context, builder, signature, args):
            out_, to_, out_ld_, source_, at_, stride_, count_, w_, w_at_, w_ld_ = args

            def far(start: Any, ld: Any, g: int, more: int) -> Any:
                there = builder.add(start, builder.mul(ld, ir.Constant(ld.type, g)))
                return builder.add(there, ir.Constant(ld.type, more))

            def place(g: int, c: int) -> Any:
                return address(context, builder, out, out_, far(to_, out_ld_, g, c * LANES), F32)

            pairs = [(g, c) for g in range(queries) for c in range(chunks)]
            held = {x: cgutils.alloca_once_value(builder, builder.load(place(*x), align=1)) for x in pairs}
            zero, one = ir.Constant(count_.type, 0), ir.Constant(count_.type, 1)
            with cgutils.for_range_slice(builder, zero, count_, one, count_.type) as (t, _):
                row = builder.add(at_, builder.mul(t, stride_))
                numbers = []
                for c in range(chunks):
                    raw = _raw(context, builder, source, source_, far(row, row, 0, c * LANES), form)
                    numbers.append(_number(builder, raw, form, 0, None, None))
                for g in range(queries):
                    weight = builder.load(address(context, builder, w, w_, far(builder.add(w_at_, t), w_ld_, g, 0)))
                    lanes = splat(builder, weight)
                    for c in range(chunks):
                        total = multiply_add(builder, numbers[c], lanes, builder.load(held[g, c]))
                        builder.store(total, held[g, c])
            for x in pairs:
                builder.store(builder.load(held[x]), place(*x), align=1)
            return context.get_dummy_value()

        index = types.intp
        return types.void(out, index, index, source, index, index, index, w, index, index), code

    return accumulate


def _dense_values_kernel(form: int) -> Callable[..., Any]:
    wide = [_value_rows(form, n, _CHUNKS) for n in (1, 2, 3, 4)]
    narrow = [_value_rows(form, n, 1) for n in (1, 2, 3, 4)]

    def some(kernels: list[Any]) -> Any:
        one, two, three, four = kernels

        @inner
        def accumulate(out, to, out_ld, source, at, stride, count, w, w_at, w_ld, left):
            if left >= 4:
                four(out, to, out_ld, source, at, stride, count, w, w_at, w_ld)
            elif left == 3:
                three(out, to, out_ld, source, at, stride, count, w, w_at, w_ld)
            elif left == 2:
                two(out, to, out_ld, source, at, stride, count, w, w_at, w_ld)
            else:
                one(out, to, out_ld, source, at, stride, count, w, w_at, w_ld)

        return accumulate

    some_wide, some_narrow = some(wide), some(narrow)

    @inner
    def accumulate(out, source, at, stride, count, w, w_at, w_ld, group, ld):
        """`out[g] += sum over t of w[w_at + g * w_ld + t] * row t`: `count` rows of `ld` elements, a multiple of 16."""
        for g in range(0, group, 4):
            weight, to, c = w_at + g * w_ld, g * ld, 0
            while c + _CHUNKS * LANES <= ld:
                some_wide(out, to + c, ld, source, at + c, stride, count, w, weight, w_ld, group - g)
                c += _CHUNKS * LANES
            while c < ld:
                some_narrow(out, to + c, ld, source, at + c, stride, count, w, weight, w_ld, group - g)
                c += LANES

    return accumulate


def _rows_kernel(form: int) -> Callable[..., Any]:
    one, two, three, four = (_key_rows(form, n) for n in (1, 2, 3, 4))

    @inner
    def logits(out, to, out_ld, source, at, stride, rows, q, q_ld, row, group):
        """`out[to + g * out_ld + t] = q[g] . row t`, `rows` rounded up to fours; row: elements of a plane, a multiple
        of 16.
        """
        for g in range(0, group, 4):
            target, query, left = to + g * out_ld, g * q_ld, group - g
            for t in range(0, rows, _TOKENS):
                here = at + t * stride
                if left >= 4:
                    four(out, target + t, out_ld, source, here, stride, q, query, q_ld, row)
                elif left == 3:
                    three(out, target + t, out_ld, source, here, stride, q, query, q_ld, row)
                elif left == 2:
                    two(out, target + t, out_ld, source, here, stride, q, query, q_ld, row)
                else:
                    one(out, target + t, out_ld, source, here, stride, q, query, q_ld, row)

    return logits


def _channels_kernel(form: int) -> Callable[..., Any]:
    one, two, three, four = (_value_row(form, n) for n in (1, 2, 3, 4))

    @inner
    def accumulate(sums, channel, rows, ld, plane_ld, source, at, stride, count, w, w_ld, group, shift, mask):
        """Add `w[g] . codes of a channel` to the 16 partial sums of each of `rows` channels from `channel` on, and of
        those of the further planes.

        `plane_ld`: channels between planes; `stride`: bytes between the codes of one channel and the next; w is zero
        beyond `count`.
        """
        for g in range(0, group, 4):
            weight, left = g * w_ld, group - g
            for r in range(rows):
                to, here = (g * ld + channel + r) * LANES, at + r * stride
                far, plane = ld * LANES, plane_ld * LANES
                if left >= 4:
                    four(sums, to, far, plane, source, here, count, w, weight, w_ld, shift, mask)
                elif left == 3:
                    three(sums, to, far, plane, source, here, count, w, weight, w_ld, shift, mask)
                elif left == 2:
                    two(sums, to, far, plane, source, here, count, w, weight, w_ld, shift, mask)
                else:
                    one(sums, to, far, plane, source, here, count, w, weight, w_ld, shift, mask)

    return accumulate


fp32_logits, bf16_logits = _rows_kernel(FP32_ROWS), _rows_kernel(BF16_ROWS)
codes8_logits, codes4_logits = _rows_kernel(CODES_8), _rows_kernel(CODES_4)
codes8_values, codes4_values, codes2_values = (_channels_kernel(form) for form in (CODES_8, CODES_4, CODES_2))
plane_values = _channels_kernel(CODE_PLANE)
fp32_values, bf16_values = _dense_values_kernel(FP32_ROWS), _dense_values_kernel(BF16_ROWS)
