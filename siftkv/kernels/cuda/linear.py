"""Linear layers of few rows on a GPU: the weights are streamed once, and what follows elementwise is part of the same
launch. One or two rows are multiplied by `src/linear.cu`, up to 16 on tensor cores by `src/linear_mma.cu`.

A library's matrix product of narrow layers takes two launches at such shapes, and starts to read its weights when the
launch before has ended. These start early: weights are on their way while the launch before still runs. A weight must
therefore not be the output of the launch right before.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from siftkv.kernels.cuda.device import gpu_of
from siftkv.kernels.cuda.elementwise import launch, rotate
from siftkv.kernels.cuda.linear_mma import LinearPlan, compiled

MOST_ROWS = 16
_MOST_PLAIN_ROWS = 2
"""Of kernels without tensor cores: with more, reading the rows of x takes longer than reading weights."""

_LEAST_BYTES = 4 << 20
"""Of a weight for tensor cores: smaller products take no time that matters, and each length of rows is compiled."""

_PAIRED = 16
"""Channels of a head that tensor cores take together: eight pairs."""

_WARPS = 8


class _Linear(ctypes.Structure):
    """`Linear` of `src/linear.cuh`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "cos", "sin", "out")),
        *((name, ctypes.c_int) for name in ("size", "pairs", "dim", "turned", "rows")),
    )


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether these kernels compute `x @ weight.T`: x `[T, E]` of few rows, weight `[N, E]`."""
    plain = x.is_contiguous() and weight.is_contiguous() and not (x.data_ptr() | weight.data_ptr()) % 16
    return plain and takes_rows(x.shape[0], weight)


def takes_rows(rows: int, weight: Tensor) -> bool:
    """`takes` for so many rows that lie as they should."""
    if not 0 < rows <= MOST_ROWS or weight.shape[0] % 2 or weight.shape[1] % 8:
        return False
    return rows <= _MOST_PLAIN_ROWS or _plan(rows, weight) is not None


def _plan(rows: int, weight: Tensor) -> LinearPlan | None:
    """How tensor cores multiply so many rows, if they do."""
    matters = weight.nbytes >= _LEAST_BYTES
    return LinearPlan.of(rows, weight.shape[1], gpu_of(weight.device)) if matters else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `siftkv.kernels.fused.linear`."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    return _launch("plain", x, weight, bias, out, weight.shape[0] // 2)


def swiglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `siftkv.kernels.fused.swiglu_linear`."""
    pairs = weight.shape[0] // 2
    return _launch("swiglu", x, weight, bias, x.new_empty(x.shape[0], pairs), pairs)


def rotated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    """See `siftkv.kernels.fused.rotated_linear`."""
    pairs, dim = weight.shape[0] // 2, cos.shape[-1]
    if x.shape[0] > _MOST_PLAIN_ROWS and dim % _PAIRED:
        heads = linear(x, weight, bias).unflatten(1, (-1, dim))
        return torch.cat([rotate(heads[:, :turned], cos, sin), heads[:, turned:]], 1)
    out = x.new_empty(x.shape[0], weight.shape[0] // dim, dim)
    return _launch("rotary", x, weight, bias, out, pairs, (cos.contiguous(), sin.contiguous(), dim, turned * dim // 2))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    kind: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    pairs: int,
    rotation: tuple[Tensor, Tensor, int, int] | None = None,
) -> Tensor:
    rows, size = x.shape
    arguments = _Linear(x=x.data_ptr(), weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr())
    arguments.out, arguments.size, arguments.pairs, arguments.rows = out.data_ptr(), size, pairs, rows
    if rotation is not None:
        arguments.cos, arguments.sin = rotation[0].data_ptr(), rotation[1].data_ptr()
        arguments.dim, arguments.turned = rotation[2:]
    plan = _plan(rows, weight) if rows > _MOST_PLAIN_ROWS else None
    if plan is not None:
        compiled(plan, x.dtype, x.device).launch(kind, pairs, arguments)
        return out
    launch(x, f"{kind}_{rows}", min(_processors(x.device), -(-pairs // _WARPS)), arguments)
    return out
