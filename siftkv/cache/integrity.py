"""The check that finds what must never happen: a page owned twice, owned and free, lost, or a length that its pages do
not hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.errors import IntegrityError
from siftkv.kernels.reference.pages import pages_needed
from siftkv.kernels.state import CacheState

_ENTRIES_AT_ONCE = 1 << 24
"""Of page tables: memory may be short when a cache is checked after an error."""


def check_integrity(state: CacheState) -> None:
    """Raise IntegrityError, saying what is wrong, unless the cache's bookkeeping is whole. Reads everything; for tests,
    debugging, and after errors.
    """
    _check_ownership(state)
    for slots in torch.arange(len(state.seen)).split(max(1, _ENTRIES_AT_ONCE // max(1, state.page_table[0].numel()))):
        _check_tables(state, slice(int(slots[0]), int(slots[-1]) + 1))
    _check_windows(state)


def _fail(message: str) -> None:
    raise IntegrityError(message)


def free_page_ids(state: CacheState) -> Tensor:
    """Ids of the free pages in the order in which they will be taken, int64."""
    taken, returned = state.counters.tolist()
    return state.free_ring[torch.arange(taken, returned, device=state.pages.device) % state.num_pages].long()


def _check_ownership(state: CacheState) -> None:
    taken, returned = state.counters.tolist()
    if not 0 <= returned - taken <= state.num_pages:
        _fail(f"the free ring counts {returned - taken} free pages of {state.num_pages}")
    count = torch.zeros(state.num_pages, dtype=torch.int64, device=state.pages.device)
    for ids in (*(table[table >= 0].long() for table in state.page_table), free_page_ids(state)):
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < state.num_pages:
            _fail("a page id lies outside the pool")
        count += torch.bincount(ids, minlength=state.num_pages)
    if bool((count > 1).any()):
        _fail(f"page {int(count.argmax())} is owned or free more than once")
    if bool((count == 0).any()):
        _fail(f"page {int(count.argmin())} is neither owned nor free: it leaked")


def _check_tables(state: CacheState, slots: slice) -> None:
    table, lengths = state.page_table[slots], state.lengths[slots]
    if bool((lengths < 0).any()):
        _fail("a tier has a negative length")
    held = pages_needed(state, lengths)
    column = torch.arange(state.width, device=held.device)
    expected = torch.zeros_like(table, dtype=torch.bool)
    for tier in range(len(state.layouts)):
        inside = column < held[..., tier, None]
        expected[..., tier // 2, :] |= inside if tier % 2 == 0 else inside.flip(-1)
    wrong = (table >= 0) != expected
    if bool(wrong.any()):
        slot, layer, head, *_ = wrong.nonzero()[0].tolist()
        _fail(f"slot {slots.start + slot}, layer {layer}, head {head}: the page table does not agree with the lengths")
    if state.skips and bool(((state.page_skip[slots] != 0) & (table < 0)).any()):
        _fail("a page is skipped where none stands")


def _check_windows(state: CacheState) -> None:
    inside = state.seen - state.window_start
    if bool((inside > state.ring_rows).any()):
        _fail(f"slot {int(inside.argmax())} keeps {int(inside.max())} tokens in a ring of {state.ring_rows} rows")
    live = state.seen > 0
    stored = state.lengths.long().sum(-1).amax((1, 2))
    if bool((live & (stored > (state.window_start - state.sinks).clamp_min(0))).any()):
        _fail("a head keeps more tokens in its tiers than have left its window")
