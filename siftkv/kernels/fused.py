"""The decoder's arithmetic around its matrix products, each operation one pass over memory where a body exists.

PyTorch runs the reference anywhere. `numba` takes bf16 batches of many rows on a CPU: there every pass through memory
counts, while at few rows the calls themselves do. `cuda` takes 16-bit tensors on GPUs of compute capability 8.0 and
later, where in a decode step every launch counts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.kernels.reference import elementwise as reference

_MANY_ROWS = 64
"""Up to this many rows a CPU is not held up by memory, and PyTorch's operations start faster."""


_FEW_ROWS = 16
"""Up to this many rows a GPU's linear layers may be kernels of our own."""


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`: x `[T, E]`, weight `[N, E]`, bias `[N]` or None, to `[T, N]`."""
    few = _few_rows(x, weight)
    return _many_rows(x, weight, bias) if few is None else few.linear(x, weight, bias)


def swiglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`swiglu` of `linear`: x `[T, E]`, weight `[2I, E]`, to `[T, I]`."""
    few = _few_rows(x, weight)
    return swiglu(_many_rows(x, weight, bias)) if few is None else few.swiglu_linear(x, weight, bias)


def rotated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, cos: Tensor, sin: Tensor, turned: int) -> Tensor:
    """`linear` to heads, the first `turned` of which are turned as by `rotate`: x `[T, E]`, weight `[heads * D, E]`, to
    `[T, heads, D]`.
    """
    few = _few_rows(x, weight)
    if few is not None:
        return few.rotated_linear(x, weight, bias, cos, sin, turned)
    heads = _many_rows(x, weight, bias).unflatten(1, (-1, cos.shape[-1]))
    return torch.cat([rotate(heads[:, :turned], cos, sin), heads[:, turned:]], 1)


def enter(
    token_ids: Tensor, positions: Tensor, embedding: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the first layer takes: embeddings `[T, E]` of token_ids `[T]`, their `rms_norm`, and the factors of `rotate`
    at positions `[T]`.

    token_ids, positions: int64. embedding `[vocab, E]`, weight `[E]`; cos, sin: rotary tables fp32 `[P, D/2]`.
    """
    if _on_gpu(embedding) and _cuda().takes_norm(embedding, weight):
        return _step().enter(token_ids, positions, embedding, weight, eps, cos, sin)
    x = F.embedding(token_ids, embedding)
    factors = rotary_factors(cos.index_select(0, positions), sin.index_select(0, positions))
    return x, rms_norm(x, weight, eps), *factors


def rotary_factors(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of `rotate` from cosines and sines fp32 `[T, D/2]`."""
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def merges_rotation(x: Tensor, weight: Tensor) -> bool:
    """Whether `rotated_linear` is one launch, and so better than its parts."""
    return _few_rows(x, weight) is not None


def _few_rows(x: Tensor, weight: Tensor) -> Any:
    """The module of kernels for very few rows, where it takes these."""
    if x.shape[0] > _FEW_ROWS or not _on_gpu(x):
        return None
    return _linear() if _linear().takes(x, weight) else None


def _many_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A library's product: on a GPU by the algorithm that was chosen for these rows, if one was."""
    if x.device.type != "cuda":
        return F.linear(x, weight, bias)
    return cast(Tensor, _products().linear(x, weight, bias))


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16) and _served(x.device)


def _body(x: Tensor) -> _Body:
    if x.dtype is torch.bfloat16 and x.device.type == "cpu" and x.shape[0] > _MANY_ROWS:
        return _numba()
    return cast(_Body, _cuda() if _on_gpu(x) else reference)


@cache
def _numba() -> _Body:
    from siftkv.kernels.numba import elementwise

    return cast(_Body, elementwise)


@cache
def _cuda() -> Any:
    from siftkv.kernels.cuda import elementwise

    return elementwise


@cache
def _linear() -> Any:
    from siftkv.kernels.cuda import linear

    return linear


@cache
def _products() -> Any:
    from siftkv.kernels.cuda import products

    return products


@cache
def _step() -> Any:
    from siftkv.kernels.cuda import step

    return step


@cache
def _served(device: torch.device) -> bool:
    """Whether the GPU and its compiler suit the CUDA body."""
    from siftkv.kernels.cuda.compile import serves

    return serves(device)
