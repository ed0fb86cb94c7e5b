"""Where each token of a request went, read from the cache: for pictures and tests, never in a step."""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.cache import KVCache
from siftkv.errors import SiftKVError
from siftkv.kernels.reference.quantize import decode
from siftkv.kernels.reference.tokens import page_of, read_records

DROPPED = -1


def window_fate(cache: KVCache) -> int:
    """The number that `token_fates` gives to tokens of the recent window and to sinks: one past the last tier."""
    return len(cache.spec.tiers)


def token_fates(cache: KVCache, slot: int, layer: int, head: int) -> Tensor:
    """The fate of every token so far of one head: int8 `[seen]`.

    An index into `cache.spec.tiers`, `window_fate(cache)` for the window and sinks, or -1 = dropped.

    Raises SiftKVError for a tier that stores no positions, unless it holds every token beyond the window.
    """
    state = cache.state
    seen = int(state.seen[slot])
    position = torch.arange(seen, device=state.pages.device)
    near = (position < state.sinks[slot]) | (position >= state.window_start[slot])
    fate = torch.full((seen,), DROPPED, dtype=torch.int8, device=state.pages.device)
    fate[near] = window_fate(cache)
    lengths = state.lengths[slot, layer, head].long()
    for tier, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        if state.layouts[tier].tier.positions:
            fate[_positions(cache, slot, layer, head, tier, length)] = tier
        elif length == int((~near).sum()):
            fate[~near] = tier
        else:
            name = state.layouts[tier].tier.name
            raise SiftKVError(f"tier {name} stores no positions, so which of its tokens are kept cannot be told")
    return fate.cpu()


def _positions(cache: KVCache, slot: int, layer: int, head: int, tier: int, length: int) -> Tensor:
    """Stored positions (int64 `[length]`) of one tier of a head."""
    state = cache.state
    index = torch.arange(length, device=state.pages.device)
    page = page_of(state, state.page_table[slot, layer, head], tier, index)
    *_, position = decode(state.layouts[tier], read_records(state, tier, page, index))
    return position
