"""What a launch of `select` is given."""

from __future__ import annotations

import ctypes

from torch import Tensor

from siftkv.kernels.cuda.pages import CacheArguments, CacheKernels
from siftkv.kernels.cuda.tensor_maps import MAP_BYTES, tensor_map
from siftkv.kernels.state import CacheState

POINTERS = ("queries", "keep", "kept", "covered", "tally")


class Arguments(ctypes.Structure):
    """`Select` of `src/select.cuh`, field by field."""

    _fields_ = (
        ("cache", CacheArguments),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("buckets", ctypes.c_void_p),
        ("taken", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("slot", "columns", "budget", "rooms", "room_tiles")),
        ("p", ctypes.c_float),
    )


class PagedArguments(ctypes.Structure):
    """The same with a tensor map, and as long as its alignment to 64 bytes makes it."""

    _fields_ = (
        ("pool_map", ctypes.c_ubyte * MAP_BYTES),
        *Arguments._fields_,
        ("_pad", ctypes.c_ubyte * (-ctypes.sizeof(Arguments) % 64)),
    )


def arguments(
    state: CacheState, tensors: dict[str, Tensor], paged_tier: int | None, pooled: bool = False
) -> Arguments | PagedArguments:
    """Arguments but for plain numbers. tensors: by name, as `POINTERS`; paged_tier: the tier whose pages a tensor map
    finds, if there is to be one.
    """
    made = Arguments() if paged_tier is None else PagedArguments()
    made.cache = CacheKernels.of(state).arguments
    for name in POINTERS:
        setattr(made, name, tensors[name].data_ptr())
    if paged_tier is not None:
        ctypes.memmove(made.pool_map, _pool_map(state, paged_tier, pooled), MAP_BYTES)
    return made


def _pool_map(state: CacheState, tier: int, pooled: bool) -> bytes:
    """64 channels of the keys of a page a copy: the pool's pages do not move, so one map serves."""
    maps: dict[tuple[int, int, bool], bytes] = state.scratch.setdefault("cuda_pool_maps", {})
    key, layout, dim = (tier, state.pages.data_ptr(), pooled), state.layouts[tier], state.window_k.shape[-1]
    if key not in maps:
        row, tokens, pages = 2 * dim, layout.tokens, len(state.pages)
        sizes: tuple[int, ...] = (dim, tokens, pages)
        strides: tuple[int, ...] = (row, layout.page_bytes)
        box: tuple[int, ...] = (64, tokens, 1)
        if pooled:  # token 4 t + 2 m + e by e, t and m
            sizes, strides = (dim, 2, tokens // 4, 2, pages), (row, 4 * row, 2 * row, layout.page_bytes)
            box = (64, 2, 4, 2, 1)
        maps[key] = tensor_map(key[1] + layout.offsets[0], sizes, strides, box)
    return maps[key]
