"""Putting a cache's books in order after an error that stopped some operation in the middle."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from siftkv.cache.integrity import check_integrity
from siftkv.kernels.state import CacheState

if TYPE_CHECKING:
    from siftkv.cache.cache import KVCache

_log = logging.getLogger("siftkv.cache")


def discard(cache: KVCache, slots: list[int]) -> None:
    """`KVCache.release` of requests that an error may have left half changed: what they own is not believed, and every
    page that no other request owns is free afterwards. Others keep what they have.
    """
    _disown(cache, slots)
    cache.release(slots)
    _rebuild_free_ring(cache.state)


def reclaim(cache: KVCache, slots: list[int], error: Exception) -> None:
    """Finish a release that `error` stopped in the middle. Raises the error if it says that the books are wrong, and
    IntegrityError if they are.
    """
    if isinstance(error, AssertionError):
        raise error
    _log.error("pages came back only by force", exc_info=error)
    _disown(cache, slots)
    _rebuild_free_ring(cache.state)
    check_integrity(cache.state)


def _disown(cache: KVCache, slots: list[int]) -> None:
    state = cache.state
    if state.pages.is_cuda:
        torch.cuda.synchronize(state.pages.device)  # work elsewhere may still write to their pages
    for slot in slots:
        cache.under_way.pop(slot, None)  # it has been waited for, and joining it may be what raised
    index = state.seen.new_tensor(slots)
    state.page_table[index] = -1
    for values in (state.lengths, state.seen, state.window_start, state.page_skip):
        values[index] = 0


def _rebuild_free_ring(state: CacheState) -> None:
    owned = torch.zeros(state.num_pages + 1, dtype=torch.bool, device=state.pages.device)
    for table in state.page_table:  # slot by slot: memory may be what was short
        owned[table.flatten().long()] = True  # -1 marks the last, which is no page
    free = (~owned[:-1]).nonzero()[:, 0]
    place = (state.counters[0] + torch.arange(len(free), device=free.device)) % state.num_pages
    state.free_ring[place] = free.to(torch.int32)
    state.counters[1] = state.counters[0] + len(free)
