"""The work of decode attention: each head's tokens in order (window, then tiers), cut into items of about
`ITEM_TOKENS`, cut into blocks.

An item never depends on the batch or on the number of threads, so neither does any result.
"""

from __future__ import annotations

import numpy as np

from siftkv.kernels.numba.compile import inner
from siftkv.kernels.numba.tiles import padded
from siftkv.kernels.numba.views import DIM, HEADS, LAYERS, SINK_ROWS, TOKENS, WIDTH, WINDOW_ROWS

ITEM_TOKENS = 1024
WINDOW_BLOCK = 64
"""Tokens of the window that are handled at a time."""

# Columns of the table of items, of heads and of blocks.
ITEM_HEAD, ITEM_START, ITEM_END, ITEM_AT, ITEM_COLUMNS = range(5)
HEAD_FIRST, HEAD_ITEMS, HEAD_PENDING, HEAD_COLUMNS = range(4)
BLOCK_TIER, BLOCK_WHERE, BLOCK_COUNT, BLOCK_AT, BLOCK_SKIPPED, BLOCK_COLUMNS = range(6)

IN_WINDOW = -1
MAX_BLOCKS = ITEM_TOKENS + 2


@inner
def window_counts(sizes, window, slot):
    """How many first tokens and how many recent ones the window shows to the newest token, and the oldest recent
    position.
    """
    now, ring = window[5][slot], sizes[WINDOW_ROWS] - sizes[SINK_ROWS]
    sinks = min(window[7][slot], now + 1)
    start = max(window[6][slot], now - ring + 1)
    return sinks, max(now - start + 1, 0), start


@inner
def window_position(index, sinks, start):
    """Position of the `index`-th token that the window shows."""
    return index if index < sinks else start + index - sinks


@inner
def window_row_of(sizes, window, slot, position):
    """Row of the window in which a position stands."""
    if position < window[7][slot]:
        return position
    return sizes[SINK_ROWS] + position % (sizes[WINDOW_ROWS] - sizes[SINK_ROWS])


@inner
def head_index(sizes, slot, layer, head):
    """Index of a head slot among all of them."""
    return (slot * sizes[LAYERS] + layer) * sizes[HEADS] + head


@inner
def table_index(sizes, tiers, head_slot, tier, page_index):
    """Where the id of a tier's `page_index`-th page stands in the flat page table."""
    width = sizes[WIDTH]
    column = page_index if tier % 2 == 0 else width - 1 - page_index
    return (head_slot * ((tiers + 1) // 2) + tier // 2) * width + column


@inner
def item_width(count):
    """Floats between the logits of one query head and the next: whole vectors, and kernels write up to three logits
    too many.
    """
    return padded(count + 3)


@inner
def plan_items(sizes, layouts, pool, window, slots, layer, items, heads):
    """Fill the tables of items and heads. Returns how many items there are and how many logits a query head needs for
    all of them.

    Items beyond the table's size are counted, not written.
    """
    tiers, made, at = len(layouts), 0, 0
    for b in range(len(slots)):
        sinks, recent, _ = window_counts(sizes, window, slots[b])
        for h in range(sizes[HEADS]):
            head_slot = head_index(sizes, slots[b], layer, h)
            row = b * sizes[HEADS] + h
            heads[row, HEAD_FIRST] = made
            start = end = 0
            for tier in range(-1, tiers):
                unit = WINDOW_BLOCK if tier < 0 else layouts[tier, TOKENS]
                rest = sinks + recent if tier < 0 else pool[5][head_slot * tiers + tier]
                while rest > 0:
                    end += min(unit, rest)
                    rest -= unit
                    if end - start >= ITEM_TOKENS:
                        made, at, start = _add_item(items, made, row, start, end, at)
            if end > start:
                made, at, start = _add_item(items, made, row, start, end, at)
            heads[row, HEAD_ITEMS] = heads[row, HEAD_PENDING] = made - heads[row, HEAD_FIRST]
    return made, at


@inner
def _add_item(items, made, row, start, end, at):
    if made < len(items):
        items[made, ITEM_HEAD], items[made, ITEM_START], items[made, ITEM_END] = row, start, end
        items[made, ITEM_AT] = at
    return made + 1, at + item_width(end - start), end


@inner
def list_blocks(sizes, layouts, pool, window, slot, head_slot, item, blocks):
    """Fill the table of an item's blocks; returns how many. A block is a page, or up to `WINDOW_BLOCK` tokens of the
    window.
    """
    tiers, made, at = len(layouts), 0, 0
    sinks, recent, _ = window_counts(sizes, window, slot)
    for tier in range(-1, tiers):
        unit = WINDOW_BLOCK if tier < 0 else layouts[tier, TOKENS]
        length = sinks + recent if tier < 0 else pool[5][head_slot * tiers + tier]
        low, high = max(item[ITEM_START] - at, 0), min(item[ITEM_END] - at, length)
        for first in range(low, high, unit):
            where, skipped = first, 0
            if tier >= 0:
                entry = table_index(sizes, tiers, head_slot, tier, first // unit)
                where = np.int64(pool[4][entry])
                if len(pool[6]):
                    skipped = np.int64(pool[6][entry])
            blocks[made, BLOCK_TIER], blocks[made, BLOCK_WHERE], blocks[made, BLOCK_SKIPPED] = tier, where, skipped
            blocks[made, BLOCK_COUNT], blocks[made, BLOCK_AT] = min(unit, high - first), at + first - item[ITEM_START]
            made += 1
        at += length
    return made


@inner
def append_rows(sizes, window, slots, layer, k, v):
    """Write the new token of each request into its window; k, v are its 16-bit words, flat."""
    size = sizes[DIM] * (len(k) // max(len(slots) * sizes[HEADS] * sizes[DIM], 1))
    for b in range(len(slots)):
        row = window_row_of(sizes, window, slots[b], window[5][slots[b]])
        for h in range(sizes[HEADS]):
            at = head_index(sizes, slots[b], layer, h) * sizes[WINDOW_ROWS] + row
            source = (b * sizes[HEADS] + h) * size
            for i in range(size):
                window[0][at * size + i] = k[source + i]
                window[2][at * size + i] = v[source + i]
            window[4][at] = 0.0
