"""`sift_step` on a GPU: plan, coordinate, commit. No number is read by the host, so a CUDA graph can hold a step."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from siftkv.kernels.cuda.pages import THREADS, CacheArguments, CacheKernels
from siftkv.kernels.state import CacheState

MOST_CATCH_UP = 1
"""Examinations a step that are launched. A rule's `catch_up` is 0 or 1."""

_POINTERS = ("slots", "done", "plans", "victims", "needs", "requests", "bases", "not_finite", "peak_pages")


class _Sift(ctypes.Structure):
    """`Sift` of `src/sift.cu`, field by field."""

    _fields_ = (
        ("cache", CacheArguments),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in ("batch", "examine", "last", "padding")),
    )


def sift_step(state: CacheState, slots: Tensor, examine: bool = True) -> Tensor:
    """`siftkv.kernels.reference.sift_step` on a GPU: slots int64 `[B]` on the device, distinct but for the padding
    slot. Returns bool `[B]`. Three launches, six with `examine`.

    Bytes, page ids and counters are the reference's, but for the last bits of rotated keys. The first call compiles and
    allocates; call it once before capturing it in a CUDA graph.
    """
    done = torch.empty(len(slots), dtype=torch.bool, device=slots.device)
    if not len(slots):
        return done
    held, slots = CacheKernels.of(state), slots.contiguous()
    arguments = _arguments(state, held, slots, done)
    turns = 1 + MOST_CATCH_UP * examine
    warps = THREADS["plan"] // 32
    grid = (-(-len(slots) * held.arguments.layers * held.arguments.heads // warps), 1)
    for turn in range(turns):
        arguments.examine, arguments.last = turn, int(turn == turns - 1)
        held.kernels["plan"].launch(grid, arguments, early=True)
        held.kernels["coordinate"].launch((1, 1), arguments, early=True)
        held.kernels["commit"].launch(grid, arguments, early=True)
    return done


def coordinate(state: CacheState, slots: Tensor) -> None:
    """The launch in the middle of `sift_step` alone, for requests that need no page: it changes nothing. For measuring
    what handing out pages takes.
    """
    held = CacheKernels.of(state)
    arguments = _arguments(state, held, slots, torch.empty(0, dtype=torch.bool, device=slots.device))
    arguments.examine = 1
    held.kernels["coordinate"].launch((1, 1), arguments, early=True)


def _arguments(state: CacheState, held: CacheKernels, slots: Tensor, done: Tensor) -> _Sift:
    arguments = _Sift(held.arguments)
    noted = {"not_finite": state.not_finite, "peak_pages": state.peak_pages}
    given = {"slots": slots, "done": done} | noted | _work(state, held)
    for name in _POINTERS:
        setattr(arguments, name, given[name].data_ptr())
    arguments.batch, arguments.padding = len(slots), state.padding_slot
    return arguments


def _work(state: CacheState, held: CacheKernels) -> dict[str, Tensor]:
    slots, layers, heads, tiers = state.lengths.shape
    head_slots = slots * layers * heads
    return {
        "plans": held.buffer("plans", head_slots, torch.int16),
        "victims": held.buffer("victims", head_slots * tiers, torch.int32),
        "needs": held.buffer("needs", slots * (2 + tiers), torch.int32, zero=True),
        # A start of 8 bytes and 2 + T counts of 4, in multiples of 8 bytes.
        "requests": held.buffer("requests", slots * (1 + (3 + tiers) // 2), torch.int64),
        "bases": held.buffer("bases", 1 + tiers, torch.int64),
    }
