"""The decoder's arithmetic between its matrix products, each operation one pass over memory where a body exists.

PyTorch runs the reference anywhere. `numba` takes bf16 batches of many rows on a CPU: there every pass through memory
counts, while at few rows the calls themselves do. `cuda` takes 16-bit tensors on GPUs of compute capability 9.0 and
later, where in a decode step every launch counts.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from siftkv.errors import SiftKVError
from siftkv.kernels.reference import elementwise as reference

_MANY_ROWS = 64
"""Up to this many rows a CPU is not held up by memory, and PyTorch's operations start faster."""


class _Body(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, arXiv 1910.07467): x `[T, E]`,
    weight `[E]` of one dtype, `[T, E]` of that dtype.

    Like `transformers`, the norm is computed in float32 and rounded to x's dtype before the weight is applied.
    """
    return _body(x).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual sum `x + update`, `[T, E]` each, rounded to their dtype, and its `rms_norm`: `[T, E]` both."""
    return _body(x).add_rms_norm(x, update, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x `[T, heads, D]` turned by rotary factors: a new contiguous tensor of x's dtype, computed in float32.

    cos and signed sin as `siftkv.models.rope.RotaryTable.gather` makes them: fp32 `[T, 1, D]`, the first half of sin
    negated. x may be a view whose last dimension is contiguous.
    """
    return _body(x).rotate(x, cos, sin)


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` (Shazeer, arXiv 2002.05202): gate_up `[T, 2I]`, I of gate before I of up, to `[T, I]`.

    silu is rounded to the dtype before the product, as in `transformers`.
    """
    return _body(gate_up).swiglu(gate_up)


def _body(x: Tensor) -> _Body:
    if x.dtype is torch.bfloat16 and x.device.type == "cpu" and x.shape[0] > _MANY_ROWS:
        return _numba()
    if x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16) and _compiles(x.device):
        return _cuda()
    return cast(_Body, reference)


@cache
def _numba() -> _Body:
    from siftkv.kernels.numba import elementwise

    return cast(_Body, elementwise)


@cache
def _cuda() -> _Body:
    from siftkv.kernels.cuda import elementwise

    return cast(_Body, elementwise)


@cache
def _compiles(device: torch.device) -> bool:
    """Whether the GPU and its compiler suit the CUDA body."""
    from siftkv.kernels.cuda.compile import architecture, nvrtc_version

    try:
        architecture(device)
        nvrtc_version()
    except SiftKVError:
        return False
    return True
