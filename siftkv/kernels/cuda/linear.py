"""Linear layers of very few rows on a GPU: the weights are streamed once, and what follows elementwise is part of the
same launch.

A library's matrix product of narrow layers takes two launches at such shapes, and starts to read its weights when the
launch before has ended. These start early: weights are on their way while the launch before still runs. A weight must
therefore not be the output of the launch right before.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from siftkv.kernels.cuda.elementwise import launch

MOST_ROWS = 2
"""With more, reading the rows of x takes longer than reading weights."""

_WARPS = 8


class _Linear(ctypes.Structure):
    """`Linear` of `src/linear.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "cos", "sin", "out")),
        *((name, ctypes.c_int) for name in ("size", "pairs", "dim", "turned")),
    )


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether these kernels compute `x @ weight.T`: x `[T, E]` of few rows, weight `[N, E]`."""
    shapes = 0 < x.shape[0] <= MOST_ROWS and x.shape[1] % 8 == 0 and weight.shape[0] % 2 == 0
    return shapes and x.is_contiguous() and weight.is_contiguous() and not (x.data_ptr() | weight.data_ptr()) % 16


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
    arguments.out, arguments.size, arguments.pairs = out.data_ptr(), size, pairs
    if rotation is not None:
        arguments.cos, arguments.sin = rotation[0].data_ptr(), rotation[1].data_ptr()
        arguments.dim, arguments.turned = rotation[2:]
    launch(x, f"{kind}_{rows}", min(_processors(x.device), -(-pairs // _WARPS)), arguments)
    return out
