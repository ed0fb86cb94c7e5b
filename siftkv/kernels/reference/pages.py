"""Page bookkeeping: plan (who needs how many), coordinate (a prefix sum gives disjoint ranges of the free ring), commit
(write the tables).

The ring's counters only grow, so the number of free pages is `returned - taken` and full and empty differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.kernels.state import UNLIMITED, CacheState, table_column


def take_pages(state: CacheState, count: Tensor) -> Tensor:
    """Take `sum(count)` pages: `count` int64 `[n]`; returns their ids int32 in order, `count[0]` ids first. The caller
    made sure they are there.
    """
    total = int(count.sum())
    taken = state.counters[0]
    where = (taken + torch.arange(total, device=count.device)) % state.num_pages
    state.counters[0] += total
    return state.free_ring[where]


def return_pages(state: CacheState, page: Tensor) -> None:
    """Give pages (int32 `[n]`) back to the ring in one operation."""
    where = (state.counters[1] + torch.arange(len(page), device=page.device)) % state.num_pages
    state.free_ring[where] = page.to(torch.int32)
    state.counters[1] += len(page)


def release(state: CacheState, slots: Tensor) -> None:
    """Give back every page of the requests in `slots` (int64 `[B]`) and empty their tables and lengths."""
    table = state.page_table[slots]
    return_pages(state, table[table >= 0])
    state.page_table[slots] = -1
    state.lengths[slots] = 0
    state.seen[slots] = 0
    state.window_start[slots] = 0


def extend_tier(state: CacheState, layer: int, slot: int, tier: int, count: Tensor) -> None:
    """Make room for `count` (int64 `[H]`) more tokens a head in a tier of one layer; lengths grow by it.

    Pages come in the order of the heads. The caller made sure that they are there.
    """
    layout = state.layouts[tier]
    length = state.lengths[slot, layer, :, tier].long()
    held, needed = -(-length // layout.tokens), -(-(length + count) // layout.tokens)
    fresh = take_pages(state, needed - held)
    head = torch.repeat_interleave(torch.arange(len(count), device=count.device), needed - held)
    first = torch.cumsum(needed - held, 0) - (needed - held)
    index = torch.arange(len(fresh), device=count.device) - first[head] + held[head]
    state.page_table[slot, layer, head, tier // 2, table_column(state.width, tier, index)] = fresh
    state.lengths[slot, layer, :, tier] = (length + count).to(torch.int32)


def pages_needed(state: CacheState, lengths: Tensor) -> Tensor:
    """Pages that `lengths` (integer `[..., T]`, tokens a tier) take: int64 `[..., T]`."""
    return -(-lengths.long() // tokens_a_page(state))


def tokens_a_page(state: CacheState) -> Tensor:
    """Tokens a page of every tier, int64 `[T]` on the cache's device (made once: a captured graph may not copy)."""
    if "tokens_a_page" not in state.scratch:
        sizes = [layout.tokens for layout in state.layouts]
        state.scratch["tokens_a_page"] = torch.tensor(sizes, device=state.lengths.device)
    tokens: Tensor = state.scratch["tokens_a_page"]
    return tokens


def caps_after(state: CacheState, slots: Tensor, seen: Tensor) -> Tensor:
    """Tokens that each head's tiers may hold when requests in `slots` (int64 `[B]`) have seen `seen` (int64 `[B]`)
    tokens: int64 `[B, L, H, T]`. A share fills its last page.
    """
    cap, tokens = state.cap[slots].long(), tokens_a_page(state)
    share = (state.cap_share[slots] * seen[:, None, None, None].float()).ceil()
    filled = -(-share.clamp(-1.0, UNLIMITED).long() // tokens) * tokens
    return torch.where(share < cap.float(), filled.minimum(cap), cap)


def most_taken(state: CacheState, slots: Tensor, steps: int) -> Tensor:
    """Most pages that the next `steps` decode steps of requests can take: slots int64 `[B]` to int64 `[]`, on the
    cache's device.

    A tier takes a page if the tokens that may come to it, one a step (two with catch-up), exceed what its last page has
    room for, and it may hold more by then; a head takes no more than one page a step (two with catch-up).
    """
    most = steps * (1 + state.catch_up[slots])[:, None, None]
    length = state.lengths[slots].long()
    full = length + -length % tokens_a_page(state)
    ending = (full - length < most[..., None]) & (caps_after(state, slots, state.seen[slots] + steps) > full)
    return torch.minimum(ending.sum(-1), most).sum()


DEFERS_FAULTS = False
"""See `siftkv.kernels.Kernels`."""


def refused_layers(state: CacheState) -> Tensor:
    """int32 zeros `[S]`: nothing is refused here, the caller checks free pages beforehand."""
    return torch.zeros(len(state.seen), dtype=torch.int32, device=state.seen.device)
