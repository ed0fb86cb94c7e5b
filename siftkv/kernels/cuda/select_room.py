"""Memory in which a selection keeps the bucket of every logit between its two halves (`src/buckets.cuh`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from siftkv.kernels.state import CacheState

TILE_KEYS = 64
_ROWS = 128
MOST_TOKENS = 8704
"""Of a head, sinks and window included, for which there is room; with more of them keys are multiplied twice."""

_POOL_SHARE = 16
"""The room is at most this part of the pool."""

_BESIDE = 2
"""Tiles beyond those of the tokens: the first need not begin with one, and maxima are due some tokens later."""

_MOST_TILES = 160
"""A sixteenth of them, and one, have no more pages than `Found` of `src/buckets.cuh` has entries for."""


class Room(NamedTuple):
    """buckets: uint8 `[rooms, tiles, rows, keys of a tile]`, for as many blocks as the device runs at once. taken:
    int32 `[rooms]`, 0 where nobody is.
    """

    buckets: Tensor
    taken: Tensor

    def holds(self, tokens: int) -> bool:
        return tokens <= TILE_KEYS * (self.buckets.shape[1] - _BESIDE)


def measure_exactly(state: CacheState) -> None:
    """From now on keys are multiplied twice, and `Selection.mass` is exact; for those who look at it."""
    state.scratch["cuda_select_room"] = {"room": None}


def room_of(state: CacheState, tokens: int) -> Room | None:
    """The cache's, made at the first call; None for heads of more tokens than it is for, and where there is no memory
    for it. A snapshot shares that of its cache.
    """
    held: dict[str, Room | None] = state.scratch.setdefault("cuda_select_room", {})
    if "room" not in held:
        held["room"] = _made(state)
    room = held["room"]
    return room if room is not None and room.holds(tokens) else None


def _made(state: CacheState) -> Room | None:
    device = state.pages.device
    rooms = torch.cuda.get_device_properties(device).multi_processor_count
    longest = min(MOST_TOKENS, state.window_k.shape[-2] + state.width * max(layout.tokens for layout in state.layouts))
    affordable = int(state.pages.numel() / (_POOL_SHARE * rooms * _ROWS * TILE_KEYS))
    tiles = min(-(-longest // TILE_KEYS) + _BESIDE, affordable, _MOST_TILES)
    if tiles <= _BESIDE:
        return None
    try:
        return Room(
            torch.empty((rooms, tiles, _ROWS, TILE_KEYS), dtype=torch.uint8, device=device),
            torch.zeros(rooms, dtype=torch.int32, device=device),
        )
    except torch.OutOfMemoryError:
        return None
