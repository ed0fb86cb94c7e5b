"""The operations of `siftkv.kernels.fused` for bf16 on a CPU: each reads its input once, in blocks of rows that stay in
cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siftkv.kernels.numba import threads
from siftkv.kernels.numba.bf16 import nearest_bf16, store_bf16
from siftkv.kernels.numba.compile import inner, kernel
from siftkv.kernels.numba.threads import finish_item, next_item, wait_for_others
from siftkv.kernels.numba.vectors import (
    LANES,
    add16,
    div16,
    exp2_16,
    fma16,
    lanes_sum,
    load16,
    load_bf16,
    min16,
    mul16,
    splat16,
    sub16,
)
from siftkv.kernels.numba.views import flat, words
from siftkv.kernels.reference import elementwise as reference

_ROWS = 32
"""Rows that a thread takes at a time."""

_LOG2E = np.float32(1.0 / math.log(2.0))
_NOTHING = np.zeros(0, np.uint16)


@kernel
def norm_rows(worker, x, update, weight, added, out, rows, size, eps, progress):
    """`out = norm(x + update) * weight`, `[rows, size]` flat bf16, and the sums to `added`; with an empty `update` the
    norm of x itself.
    """
    items = (rows + _ROWS - 1) // _ROWS
    item = next_item(progress, items)
    while item >= 0:
        for row in range(item * _ROWS, min((item + 1) * _ROWS, rows)):
            _norm_row(x, update, weight, added, out, row * size, size, eps)
        finish_item(progress)
        item = next_item(progress, items)
    wait_for_others(worker, progress, items)


@inner
def _norm_row(x, update, weight, added, out, at, size, eps):
    total = splat16(np.float32(0))
    if len(update) > 0:
        for c in range(at, at + size, LANES):
            value = nearest_bf16(add16(load_bf16(x, c), load_bf16(update, c)))
            store_bf16(added, c, value)
            total = fma16(value, value, total)
        x = added
    else:
        for c in range(at, at + size, LANES):
            value = load_bf16(x, c)
            total = fma16(value, value, total)
    inverse = splat16(np.float32(1) / np.sqrt(lanes_sum(total) / np.float32(size) + eps))
    for c in range(0, size, LANES):
        value = nearest_bf16(mul16(load_bf16(x, at + c), inverse))
        store_bf16(out, at + c, mul16(value, load_bf16(weight, c)))


@kernel
def rotate_rows(worker, x, cos, sin, out, shape, strides, progress):
    """Rotary embedding of `[T, heads, D]` bf16: x flat with strides of tokens and heads, `out` contiguous; cos and sin
    flat fp32 `[T, D]`. D is 32 or more.
    """
    tokens, heads, dim = shape
    half, items = dim // 2, (tokens + _ROWS - 1) // _ROWS
    item = next_item(progress, items)
    while item >= 0:
        for t in range(item * _ROWS, min((item + 1) * _ROWS, tokens)):
            for step in range(0, half, LANES):
                # The last vector may overlap the one before: written twice, the same.
                c = min(step, half - LANES)
                cosine, sine = load16(cos, t * dim + c), load16(sin, t * dim + half + c)
                for h in range(heads):
                    source, target = t * strides[0] + h * strides[1] + c, (t * heads + h) * dim + c
                    low, high = load_bf16(x, source), load_bf16(x, source + half)
                    store_bf16(out, target, sub16(mul16(low, cosine), mul16(high, sine)))
                    store_bf16(out, target + half, fma16(low, sine, mul16(high, cosine)))
        finish_item(progress)
        item = next_item(progress, items)
    wait_for_others(worker, progress, items)


@kernel
def swiglu_rows(worker, gate_up, out, rows, size, progress):
    """`silu(gate) * up` of flat bf16 `[rows, 2, size]` to `[rows, size]`; size is 16 or more."""
    items = (rows + _ROWS - 1) // _ROWS
    item = next_item(progress, items)
    slope, one, most = splat16(-_LOG2E), splat16(np.float32(1)), splat16(np.float32(100))
    while item >= 0:
        for row in range(item * _ROWS, min((item + 1) * _ROWS, rows)):
            for step in range(0, size, LANES):
                c = min(step, size - LANES)
                gate = load_bf16(gate_up, 2 * row * size + c)
                # In this order the minimum keeps NaN.
                power = exp2_16(min16(most, mul16(gate, slope)))
                silu = nearest_bf16(div16(gate, add16(power, one)))
                store_bf16(out, row * size + c, mul16(silu, load_bf16(gate_up, (2 * row + 1) * size + c)))
        finish_item(progress)
        item = next_item(progress, items)
    wait_for_others(worker, progress, items)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `siftkv.kernels.fused.rms_norm`."""
    if x.shape[-1] % LANES:
        return reference.rms_norm(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    _norm(x, _NOTHING, weight, _NOTHING, out, eps)
    return out


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `siftkv.kernels.fused.add_rms_norm`."""
    if x.shape[-1] % LANES:
        return reference.add_rms_norm(x, update, weight, eps)
    x, update = x.contiguous(), update.contiguous()
    added, out = torch.empty_like(x), torch.empty_like(x)
    _norm(x, words(update), weight, words(added), out, eps)
    return added, out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `siftkv.kernels.fused.rotate`."""
    if x.shape[-1] < 2 * LANES or x.stride(-1) != 1:
        return reference.rotate(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype)
    factors = [factor.contiguous().view(-1).numpy() for factor in (cos, sin)]
    shape, strides = (x.shape[0], x.shape[1], x.shape[2]), x.stride()[:2]
    _run(rotate_rows, len(x), flat(x).view(torch.uint16).numpy(), *factors, words(out), shape, strides)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """See `siftkv.kernels.fused.swiglu`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if size < LANES:
        return reference.swiglu(gate_up)
    out = torch.empty(rows, size, dtype=gate_up.dtype)
    _run(swiglu_rows, rows, words(gate_up.contiguous()), words(out), rows, size)
    return out


def _norm(x: Tensor, update: Any, weight: Tensor, added: Any, out: Tensor, eps: float) -> None:
    rows, size = x.shape
    _run(norm_rows, rows, words(x), update, words(weight), added, words(out), rows, size, np.float32(eps))


def _run(kernel: Any, rows: int, *arguments: Any) -> None:
    threads.run(kernel, threads.workers(-(-rows // _ROWS)), *arguments, np.zeros(2, np.int64))
