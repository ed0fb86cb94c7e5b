"""What a selection reads of a request, copied, so that it can run beside decode steps."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.driver import Kernel, Module
from siftkv.kernels.cuda.pages import CacheArguments, CacheKernels, read_sources
from siftkv.kernels.state import SELECTION_TENSORS, CacheState

_MOST_COPIES = 8
_THREADS = 256
_BLOCK_WORDS = 16 * _THREADS


class _Copies(ctypes.Structure):
    """`Copies` of `src/snapshot.cu`."""

    _fields_ = (
        ("source", ctypes.c_void_p * _MOST_COPIES),
        ("target", ctypes.c_void_p * _MOST_COPIES),
        ("words", ctypes.c_int64 * _MOST_COPIES),
        ("first", ctypes.c_int * _MOST_COPIES),
        ("wide", ctypes.c_int * _MOST_COPIES),
    )


def source() -> str:
    """CUDA source of the copies."""
    return "#define MODEL_BF16 1\n" + read_sources(("ptx.cuh", "snapshot.cu"))


@cache
def _kernel(device: torch.device) -> Kernel:
    return Module(compile_cubin(source(), architecture(device))).kernel("copies", _THREADS)


def snapshot(state: CacheState, slot: int) -> CacheState:
    """The cache as `select` sees the request in `slot` now: `SELECTION_TENSORS` are copies, of one slot, everything
    else is `state`'s own. Of use for `select` with slot 0 alone.

    Nothing is read by the host; the current stream is used. Compiled kernels, and the memory of selections, are shared.
    """
    theirs = {name: getattr(state, name)[slot : slot + 1] for name in SELECTION_TENSORS}
    own: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in theirs.items()}
    _copy(list(theirs.values()), list(own.values()))
    held = CacheKernels.of(state)
    arguments = CacheArguments.from_buffer_copy(held.arguments)
    for name, tensor in own.items():
        if name != "queries":  # which are an argument of their own
            setattr(arguments, "table" if name == "page_table" else name, tensor.data_ptr())
    shared = {name: state.scratch.setdefault(name, {}) for name in ("cuda_select", "cuda_select_room")}
    return replace(state, **own, scratch=shared | {"cuda_cache": replace(held, arguments=arguments)})


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Contiguous tensors whose bytes are whole words of four, by one launch."""
    copies, blocks = _Copies(), 0
    assert len(sources) == _MOST_COPIES
    for i, (x, y) in enumerate(zip(sources, targets, strict=True)):
        size, at = x.numel() * x.element_size(), (x.data_ptr(), y.data_ptr())
        copies.source[i], copies.target[i] = at
        copies.words[i], copies.first[i] = size // 4, blocks
        copies.wide[i] = not any(n % 16 for n in (size, *at))
        blocks += -(-size // (4 * _BLOCK_WORDS))
    _kernel(sources[0].device).launch((blocks, 1), copies)
