"""`sift_step` on a GPU: plan, coordinate, commit. No number is read by the host, so a CUDA graph can hold a step."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from siftkv.kernels.cuda.pages import THREADS, CacheArguments, CacheKernels
from siftkv.kernels.state import CacheState

MOST_CATCH_UP = 1
"""Examinations a step that are launched. A rule's `catch_up` is 0 or 1."""

_POINTERS = ("slots", "done", "plans", "victims", "needs", "requests", "bases")


class _Sift(ctypes.Structure):
    """`Sift` of `src/sift.cu`, field by field."""

    _fields_ = (
        ("cache", CacheArguments),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in ("batch", "advance", "examine")),
    )


def sift_step(state: CacheState, slots: Tensor, advance: bool = True) -> Tensor:
    """`siftkv.kernels.reference.sift_step` on a GPU: slots int64 `[B]` on the device, distinct. Returns bool `[B]`.

    Bytes, page ids and counters are the reference's, but for the last bits of rotated keys. The first call compiles and
    allocates; call it once before capturing it in a CUDA graph.
    """
    done = torch.empty(len(slots), dtype=torch.bool, device=slots.device)
    if not len(slots):
        return done
    held, slots = CacheKernels.of(state), slots.contiguous()
    arguments = _Sift(held.arguments)
    given = {"slots": slots, "done": done} | _work(state, held)
    for name in _POINTERS:
        setattr(arguments, name, given[name].data_ptr())
    arguments.batch = len(slots)
    warps = THREADS["plan"] // 32
    grid = (-(-len(slots) * held.arguments.layers * held.arguments.heads // warps), 1)
    for examine in range(1 + MOST_CATCH_UP):
        arguments.advance, arguments.examine = int(advance and not examine), examine
        held.kernels["plan"].launch(grid, arguments)
        held.kernels["coordinate"].launch((1, 1), arguments)
        held.kernels["commit"].launch(grid, arguments)
    return done


def _work(state: CacheState, held: CacheKernels) -> dict[str, Tensor]:
    slots, layers, heads, tiers = state.lengths.shape
    head_slots = slots * layers * heads
    return {
        "plans": held.buffer("plans", head_slots, torch.int16),
        "victims": held.buffer("victims", head_slots * tiers, torch.int32),
        "needs": held.buffer("needs", slots * (1 + tiers), torch.int32, zero=True),
        # A start of 8 bytes and 2 + T counts of 4, in multiples of 8 bytes.
        "requests": held.buffer("requests", slots * (1 + (3 + tiers) // 2), torch.int64),
        "bases": held.buffer("bases", 1 + tiers, torch.int64),
    }
