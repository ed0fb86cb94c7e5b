"""The operations of `siftkv.kernels.fused` on a GPU: one launch each, and early, so that starting takes no time of its
own.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.device import GPU, gpu_of
from siftkv.kernels.cuda.driver import Kernel, Module
from siftkv.kernels.cuda.pages import read_sources
from siftkv.kernels.reference import elementwise as reference

_SOURCES = ("ptx.cuh", "values.cuh", "elementwise.cu", "linear.cuh", "linear.cu", "step.cu")
_THREADS = {
    "rms_norm": 512,
    "add_rms_norm": 512,
    "add_rms_norm_narrow": 512,
    "rotate": 128,
    "swiglu": 128,
    "enter": 512,
    "choose": 1024,
}
_LINEARS = [f"{kind}_{rows}" for kind in ("plain", "swiglu", "rotary") for rows in (1, 2)]
_LINEAR_THREADS, _LINEAR_STAGE_BYTES, _MOST_LINEAR_STAGES = 256, 8 * 4096, 6
"""Threads of a block, bytes that its warps hold a stage, and stages from which more do not help."""
_PIECE = 8
"""Channels that a thread reads at once."""
_NARROW_NORM = 512 * _PIECE
_LARGEST_NORM = 8 * _NARROW_NORM
"""Channels that the threads of one block hold in registers."""


class Norm(ctypes.Structure):
    """`Norm` of `src/elementwise.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "update", "weight", "added", "out")),
        ("eps", ctypes.c_float),
        ("size", ctypes.c_int),
    )


class _Rotate(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "cos", "sin", "out")),
        *((name, ctypes.c_int64) for name in ("token", "head")),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "dim")),
    )


class _Swiglu(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate_up", "out")),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int),
    )


def linear_stages(gpu: GPU) -> int:
    """Stages of the rings through which linear layers stream their weights."""
    return min(_MOST_LINEAR_STAGES, gpu.dynamic_shared_bytes // _LINEAR_STAGE_BYTES)


def source(dtype: torch.dtype, stages: int) -> str:
    """CUDA source of all operations for one 16-bit type; stages: see `linear_stages`."""
    constants = f"#define MODEL_BF16 {int(dtype == torch.bfloat16)}\nconstexpr int LINEAR_STAGES = {stages};"
    return f"{constants}\n{read_sources(_SOURCES)}"


@cache
def _kernels(dtype: torch.dtype, device: torch.device) -> dict[str, Kernel]:
    stages = linear_stages(gpu_of(device))
    module = Module(compile_cubin(source(dtype, stages), architecture(device)))
    linears = {name: module.kernel(name, _LINEAR_THREADS, stages * _LINEAR_STAGE_BYTES) for name in _LINEARS}
    return linears | {name: module.kernel(name, threads) for name, threads in _THREADS.items()}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `siftkv.kernels.fused.rms_norm`."""
    if not (takes_norm(x, weight) and x.is_contiguous()):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    pointers = (x.data_ptr(), None, weight.data_ptr(), None, out.data_ptr())
    launch(x, "rms_norm", len(x), Norm(*pointers, eps, x.shape[1]))
    return out


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `siftkv.kernels.fused.add_rms_norm`."""
    if not (takes_norm(x, weight) and x.is_contiguous() and update.is_contiguous() and _aligned(update)):
        return reference.add_rms_norm(x, update, weight, eps)
    added, out = torch.empty_like(x), torch.empty_like(x)
    pointers = (t.data_ptr() for t in (x, update, weight, added, out))
    name = "add_rms_norm_narrow" if x.shape[1] <= _NARROW_NORM else "add_rms_norm"
    launch(x, name, len(x), Norm(*pointers, eps, x.shape[1]))
    return added, out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `siftkv.kernels.fused.rotate`."""
    tokens, heads, dim = x.shape
    rows = x.stride(-1) == 1 and not any(stride % _PIECE for stride in x.stride()[:2])
    factors = cos.is_contiguous() and sin.is_contiguous() and _aligned(cos) and _aligned(sin)
    if dim % (2 * _PIECE) or not (rows and factors and _aligned(x)):
        return reference.rotate(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pointers = (t.data_ptr() for t in (x, cos, sin, out))
    arguments = _Rotate(*pointers, *x.stride()[:2], tokens, heads, dim)
    launch(x, "rotate", _blocks(out.numel() // (2 * _PIECE)), arguments)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """See `siftkv.kernels.fused.swiglu`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if size % _PIECE or not (gate_up.is_contiguous() and _aligned(gate_up)):
        return reference.swiglu(gate_up)
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    arguments = _Swiglu(gate_up.data_ptr(), out.data_ptr(), rows, size)
    launch(gate_up, "swiglu", _blocks(out.numel() // _PIECE), arguments)
    return out


def launch(x: Tensor, name: str, blocks: int, arguments: ctypes.Structure) -> None:
    """Launch the kernel of x's type and device, early."""
    if blocks:
        _kernels(x.dtype, x.device)[name].launch((blocks, 1), arguments, early=True)


def _blocks(pieces: int) -> int:
    return -(-pieces // _THREADS["rotate"])


def takes_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether the norms here take rows such as x's, `[n, E]`."""
    whole = x.shape[-1] % _PIECE == 0 and x.shape[-1] <= _LARGEST_NORM
    return whole and _aligned(x) and _aligned(weight)


def _aligned(x: Tensor) -> bool:
    """Whether it can be read in pieces of 16 bytes."""
    return x.data_ptr() % 16 == 0
