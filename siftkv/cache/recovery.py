"""Putting a cache's books in order after an error that stopped some operation in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from siftkv.kernels.state import CacheState

if TYPE_CHECKING:
    from siftkv.cache.cache import KVCache


def discard(cache: KVCache, slots: list[int]) -> None:
    """`KVCache.release` of requests that an error may have left half changed: what they own is not believed, and every
    page that no other request owns is free afterwards. Others keep what they have.
    """
    index = cache.state.seen.new_tensor(slots)
    cache.state.page_table[index] = -1
    cache.state.lengths[index] = 0
    cache.release(slots)
    _rebuild_free_ring(cache.state)


def _rebuild_free_ring(state: CacheState) -> None:
    owned = torch.zeros(state.num_pages + 1, dtype=torch.bool, device=state.pages.device)
    for table in state.page_table:  # slot by slot: memory may be what was short
        owned[table.flatten().long()] = True  # -1 marks the last, which is no page
    free = (~owned[:-1]).nonzero()[:, 0]
    place = (state.counters[0] + torch.arange(len(free), device=free.device)) % state.num_pages
    state.free_ring[place] = free.to(torch.int32)
    state.counters[1] = state.counters[0] + len(free)
