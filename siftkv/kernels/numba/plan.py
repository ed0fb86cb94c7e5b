"""The plan of a sifting step: what happens in each tier of each head slot, from scores only, and the pages that it
takes and returns.
"""

from __future__ import annotations

import numpy as np

from siftkv.kernels.numba.bits import score_from_bits
from siftkv.kernels.numba.blocks import head_index, table_index, window_row_of
from siftkv.kernels.numba.compile import inner, kernel
from siftkv.kernels.numba.threads import finish_item, next_item, wait_for_others
from siftkv.kernels.numba.tiles import prefetch_bytes
from siftkv.kernels.numba.views import HEADS, LAYERS, NUM_PAGES, PAGE_BYTES, SCORE_AT, SCORES, TOKENS, WINDOW_ROWS

_AHEAD = 8
"""Pages between the one whose scores are read and the one whose scores are asked for."""

NOTHING, APPEND, OVERWRITE, REMOVE = range(4)

# Columns of the plan of one tier of one head slot: what, the slot in tier of the token that goes, and where in the
# ring an emptied page goes (or -1).
ACTION, VICTIM, RETURNS, PLAN_COLUMNS = range(4)


@inner
def _weakest(layout, pool, tables_at, sign, length):
    """Bits of the lowest score of a tier and its slot in tier, the first of equals: pages stand at `tables_at + sign
    * i`.
    """
    tokens, lowest, best = layout[TOKENS], np.uint16(0xFFFF), 0
    pages = (length + tokens - 1) // tokens
    for first in range(0, length, tokens):
        ahead = min(first // tokens + _AHEAD, pages - 1)
        soon = np.int64(pool[4][tables_at + sign * ahead]) * layout[PAGE_BYTES] + layout[SCORE_AT]
        prefetch_bytes(pool[0], soon, 2 * tokens)
        page = np.int64(pool[4][tables_at + sign * (first // tokens)])
        at = (page * layout[PAGE_BYTES] + layout[SCORE_AT]) // 2
        here = np.uint16(0xFFFF)
        for t in range(at, at + min(tokens, length - first)):
            here = min(here, pool[1][t])
        if here < lowest:
            lowest, best = here, first
    for t in range(min(tokens, length - best)):
        page = np.int64(pool[4][tables_at + sign * (best // tokens)])
        if pool[1][(page * layout[PAGE_BYTES] + layout[SCORE_AT]) // 2 + t] == lowest:
            return lowest, best + t
    return lowest, best


@inner
def _cap(rules, at, seen, tokens):
    """Tokens that a head's tier may hold after `seen` tokens: a share fills its last page of so many."""
    cap = np.int64(rules[4][at])
    share = np.ceil(rules[5][at] * np.float32(seen))
    if share >= np.float32(cap):
        return cap
    return min(-(-np.int64(max(share, np.float32(-1))) // tokens) * tokens, cap)


@inner
def _plan_head(sizes, layouts, pool, rules, head_slot, seen, active, score, examine, plan):
    """One head slot: the newcomer goes down the tiers until one takes it, and so does what it displaces."""
    tiers = len(layouts)
    for tier in range(tiers):
        at = head_slot * tiers + tier
        length, cap = np.int64(pool[5][at]), _cap(rules, at, seen, layouts[tier, TOKENS])
        threshold = rules[3][at] / np.float32(seen)
        plan[tier, ACTION], plan[tier, RETURNS] = NOTHING, -1
        accept = active and cap > 0 and score >= threshold
        if not accept and (active or not examine or length == 0):
            continue
        weakest, victim = np.float32(np.inf), 0
        if layouts[tier, SCORES] and length > 0:
            start = table_index(sizes, tiers, head_slot, tier, 0)
            bits, victim = _weakest(layouts[tier], pool, start, 1 if tier % 2 == 0 else -1, length)
            weakest = score_from_bits(bits)
        plan[tier, VICTIM] = victim
        full, leaves = length + 1 > cap, weakest < threshold
        if active:
            if full and score < weakest:
                continue
            if leaves or (full and weakest <= score):
                plan[tier, ACTION], score = OVERWRITE, weakest
            else:
                plan[tier, ACTION], active = APPEND, False
        elif leaves:
            plan[tier, ACTION], score, active = REMOVE, weakest, True


@kernel
def plan_heads(worker, slots, examine, sizes, layouts, pool, window, rules, plans, progress):
    """Plans int64 `[B, L, H, T, PLAN_COLUMNS]` of all head slots; an item is one layer of one request."""
    items = len(slots) * sizes[LAYERS]
    item = next_item(progress, items)
    while item >= 0:
        b, layer = item // sizes[LAYERS], item % sizes[LAYERS]
        slot = slots[b]
        seen, start = window[5][slot], window[6][slot]
        active = not examine and seen - start > rules[0][slot]
        row = window_row_of(sizes, window, slot, start)
        for h in range(sizes[HEADS]):
            head_slot = head_index(sizes, slot, layer, h)
            score = window[4][head_slot * sizes[WINDOW_ROWS] + row]
            _plan_head(sizes, layouts, pool, rules, head_slot, seen, active, score, examine, plans[b, layer, h])
        finish_item(progress)
        item = next_item(progress, items)
    wait_for_others(worker, progress, items)


@kernel
def coordinate(slots, sizes, layouts, pool, ring, plans, granted):
    """Take the pages that appends need, requests in order while they last, and book the places in the ring of those
    that removals will return.

    Requests that are not served lose their plan. Returns how many tokens enter a tier.
    """
    free_ring, counters = ring
    free, needed, entering, tiers = counters[1] - counters[0], 0, 0, len(layouts)
    for b in range(len(slots)):
        needed += _pages_needed(slots[b], sizes, layouts, pool, plans[b])
        granted[b] = needed <= free
        for layer in range(sizes[LAYERS]):
            for h in range(sizes[HEADS]):
                head_slot = head_index(sizes, slots[b], layer, h)
                for tier in range(tiers):
                    action = plans[b, layer, h, tier, ACTION]
                    length, tokens = np.int64(pool[5][head_slot * tiers + tier]), layouts[tier, TOKENS]
                    if not granted[b]:
                        plans[b, layer, h, tier, ACTION] = NOTHING
                    elif action == APPEND and length % tokens == 0:
                        pool[4][table_index(sizes, tiers, head_slot, tier, length // tokens)] = free_ring[
                            counters[0] % sizes[NUM_PAGES]
                        ]
                        counters[0] += 1
                    if granted[b] and action in (APPEND, OVERWRITE):
                        entering += 1
    for tier in range(tiers):
        for b in range(len(slots)):
            for layer in range(sizes[LAYERS]):
                for h in range(sizes[HEADS]):
                    length = np.int64(pool[5][head_index(sizes, slots[b], layer, h) * tiers + tier])
                    if plans[b, layer, h, tier, ACTION] == REMOVE:
                        entering += 1
                        if (length - 1) % layouts[tier, TOKENS] == 0:
                            plans[b, layer, h, tier, RETURNS] = counters[1] % sizes[NUM_PAGES]
                            counters[1] += 1
    return entering


@inner
def _pages_needed(slot, sizes, layouts, pool, plans):
    needed, tiers = 0, len(layouts)
    for layer in range(sizes[LAYERS]):
        for h in range(sizes[HEADS]):
            for tier in range(tiers):
                length = np.int64(pool[5][head_index(sizes, slot, layer, h) * tiers + tier])
                if plans[layer, h, tier, ACTION] == APPEND and length % layouts[tier, TOKENS] == 0:
                    needed += 1
    return needed
