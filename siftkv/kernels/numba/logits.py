"""Logits of one block of tokens, the softmax over the blocks of an item, and what both passes share."""

from __future__ import annotations

import math

import numpy as np

from siftkv.kernels.numba.blocks import (
    BLOCK_COUNT,
    BLOCK_SKIPPED,
    BLOCK_TIER,
    BLOCK_WHERE,
    IN_WINDOW,
    window_counts,
    window_position,
    window_row_of,
)
from siftkv.kernels.numba.compile import inlined, inner
from siftkv.kernels.numba.dots import (
    bf16_logits,
    codes4_logits,
    codes8_logits,
    fp32_logits,
)
from siftkv.kernels.numba.tiles import (
    padded,
    prefetch_bytes,
    unpack_codes,
    unpack_dense,
    unpack_meta,
)
from siftkv.kernels.numba.vectors import (
    LANES,
    add16,
    exp2_16,
    fma16,
    lanes_max,
    lanes_sum,
    load16,
    max16,
    splat16,
    store16,
    sub16,
)
from siftkv.kernels.numba.views import (
    BF16,
    DIM,
    FP32,
    KEY_AT,
    KEY_BITS,
    KEY_GROUPS,
    KEY_META_AT,
    KEY_ROW,
    KIND,
    PAGE_BYTES,
    POSITION_AT,
    POSITIONS,
    QUANTISED,
    SCORE_AT,
    VALUE_AT,
    WEIGHT_AT,
    WEIGHTS,
    WINDOW_KIND,
    WINDOW_ROWS,
)

_LOG2E = np.float32(1.0 / math.log(2.0))

TILE_TOKENS = 32
"""Tokens of a tile: with 128 channels it still leaves half of a first-level cache."""


@inlined
def unpack_window(sizes, window, slot, head_slot, first, count, values, tile, ld):
    """Keys or values of `count` tokens of the window from the `first`-th on."""
    sinks, _, start = window_counts(sizes, window, slot)
    words, floats = (window[2], window[3]) if values else (window[0], window[1])
    dim, kind = sizes[DIM], sizes[WINDOW_KIND]
    for t in range(count):
        row = window_row_of(sizes, window, slot, window_position(first + t, sinks, start))
        element = (head_slot * sizes[WINDOW_ROWS] + row) * dim
        unpack_dense(tile, t * ld, kind, words, floats, element, dim)


@inlined
def unpack_page_rows(layout, pool, page, values, first, count, dim, tile, ld):
    """Token-major rows of a page, keys or dense values, to the tile: codes where the tier is quantised."""
    at = page * layout[PAGE_BYTES] + (layout[VALUE_AT] if values else layout[KEY_AT])
    if layout[KIND] == QUANTISED:
        row, bits = layout[KEY_ROW], layout[KEY_BITS]
        for t in range(count):
            unpack_codes(tile, t * ld, pool[0], at + (first + t) * row, row, bits)
        return
    size = 4 if layout[KIND] == FP32 else 2
    for t in range(count):
        unpack_dense(tile, t * ld, layout[KIND], pool[1], pool[3], at // size + (first + t) * dim, dim)


@inlined
def block_logits(
    block, sizes, layouts, pool, window, slot, head_slot, q, q_rotated, q_sum, group, ld, space, out, at, out_ld
):
    """Raw logits of a block, without the bias term, to `out[at + g * out_ld + t]`."""
    tier, where, count = block[BLOCK_TIER], block[BLOCK_WHERE], block[BLOCK_COUNT]
    tile, scale, zero = space[0], space[1], space[2]
    dim = sizes[DIM]
    quantised = tier >= 0 and layouts[tier, KIND] == QUANTISED
    groups = layouts[tier, KEY_GROUPS] if quantised else 0
    if quantised:
        start = (where * layouts[tier, PAGE_BYTES] + layouts[tier, KEY_META_AT]) // 4
        unpack_meta(scale, zero, pool[2], start, count * groups)
    if (
        tier == IN_WINDOW
        or groups > 1
        or not _direct_logits(
            layouts[tier], pool, where, count, dim, q_rotated if quantised else q, group, ld, out, at, out_ld
        )
    ):
        for first in range(0, count, TILE_TOKENS):
            rows = min(TILE_TOKENS, count - first)
            if tier == IN_WINDOW:
                unpack_window(sizes, window, slot, head_slot, where + first, rows, False, tile, ld)
            else:
                unpack_page_rows(layouts[tier], pool, where, False, first, rows, dim, tile, ld)
            if groups > 1:
                _apply_meta(tile, scale, zero, first, rows, dim, groups, ld)
            fp32_logits(out, at + first, out_ld, tile, 0, ld, rows, q_rotated if quantised else q, ld, ld, group)
    if groups == 1:
        for g in range(group):
            to, total = at + g * out_ld, q_sum[g]
            for t in range(count):
                out[to + t] = out[to + t] * scale[t] + zero[t] * total


@inlined
def _direct_logits(layout, pool, page, count, dim, q, group, ld, out, at, out_ld):
    """Logits of the common layouts straight from their pages; false where the layout is not one of them."""
    start, row = page * layout[PAGE_BYTES] + layout[KEY_AT], layout[KEY_ROW]
    if layout[KIND] == BF16 and dim % LANES == 0:
        bf16_logits(out, at, out_ld, pool[1], start // 2, dim, count, q, ld, dim, group)
    elif layout[KIND] != QUANTISED or row % LANES:
        return False
    elif layout[KEY_BITS] == 8:
        codes8_logits(out, at, out_ld, pool[0], start, row, count, q, ld, row, group)
    elif layout[KEY_BITS] == 4:
        codes4_logits(out, at, out_ld, pool[0], start, row, count, q, ld, row, group)
    else:
        return False
    return True


@inlined
def _apply_meta(tile, scale, zero, first, rows, dim, groups, ld):
    width = dim // groups
    for t in range(rows):
        for i in range(groups):
            s, z = scale[(first + t) * groups + i], zero[(first + t) * groups + i]
            for c in range(t * ld + i * width, t * ld + (i + 1) * width):
                tile[c] = tile[c] * s + z


@inlined
def add_bias(block, layouts, pool, rotary, layer, head, q, group, dim, ld, terms, out, at, out_ld):
    """Add `q . RoPE_p(b_r)` to the logits of a block of a quantised tier: `a cos + b sin` over the pairs that the bias
    of the head keeps, where `a` and `b` (in `terms`, zero for other pairs) do not depend on the token.
    """
    tier, half = block[BLOCK_TIER], dim // 2
    rank = rotary[4][layer, head]
    if tier == IN_WINDOW or layouts[tier, KIND] != QUANTISED or rank == 0:
        return
    terms[: group * dim] = 0.0
    for r in range(rank):
        pair = rotary[3][layer, head, r]
        low, high = rotary[2][layer, head, pair], rotary[2][layer, head, pair + half]
        for g in range(group):
            x, y = q[g * ld + pair], q[g * ld + pair + half]
            terms[g * dim + pair], terms[g * dim + pair + half] = x * low + y * high, y * low - x * high
    positions = (block[BLOCK_WHERE] * layouts[tier, PAGE_BYTES] + layouts[tier, POSITION_AT]) // 4
    whole = half // LANES * LANES
    for t in range(block[BLOCK_COUNT]):
        position = np.int64(pool[2][positions + t]) if layouts[tier, POSITIONS] else 0
        position = min(max(position, 0), len(rotary[0]) - 1)
        row = position * half
        for g in range(group):
            term, total = g * dim, splat16(np.float32(0))
            for c in range(0, whole, LANES):
                total = fma16(load16(rotary[0], row + c), load16(terms, term + c), total)
                total = fma16(load16(rotary[1], row + c), load16(terms, term + half + c), total)
            rest = lanes_sum(total)
            for c in range(whole, half):
                rest += rotary[0][position, c] * terms[term + c] + rotary[1][position, c] * terms[term + half + c]
            out[at + g * out_ld + t] += rest


@inlined
def add_weights(block, layouts, pool, group, out, at, out_ld):
    """Add the log-weights of a block's tokens to its logits, which count in base two."""
    tier = block[BLOCK_TIER]
    if tier == IN_WINDOW or not layouts[tier, WEIGHTS]:
        return
    start = (block[BLOCK_WHERE] * layouts[tier, PAGE_BYTES] + layouts[tier, WEIGHT_AT]) // 4
    for g in range(group):
        for t in range(block[BLOCK_COUNT]):
            out[at + g * out_ld + t] += pool[3][start + t] * _LOG2E


@inner
def skip_logits(block, group, out, at, out_ld):
    """Logits of a block that attention ignores."""
    for g in range(group):
        for t in range(block[BLOCK_COUNT]):
            out[at + g * out_ld + t] = -np.inf


@inner
def softmax_rows(logits, at, count, ld, group, peak, total):
    """In place, for each query head: `p = 2 ** (logit - peak)`; `peak[g]` and `total[g]` are the row's maximum and
    sum. A row that is all skipped has the maximum minus infinity, and so counts for nothing when items are merged.
    """
    for g in range(group):
        row = at + g * ld
        for t in range(count, padded(count)):
            logits[row + t] = -np.inf
        largest = load16(logits, row)
        for t in range(LANES, count, LANES):
            largest = max16(load16(logits, row + t), largest)
        peak[g] = lanes_max(largest)
        finite = peak[g] if peak[g] > -np.inf else np.float32(0)
        subtract, added = splat16(finite), splat16(np.float32(0))
        for t in range(0, count, LANES):
            p = exp2_16(sub16(load16(logits, row + t), subtract))
            store16(logits, row + t, p)
            added = add16(added, p)
        total[g] = lanes_sum(added)
        for t in range(count, padded(count)):
            logits[row + t] = 0.0


@inlined
def prefetch_block(block, layouts, pool, values):
    """Ask for the keys or the values of a block, metadata included, wherever its page stands."""
    tier = block[BLOCK_TIER]
    if tier == IN_WINDOW or block[BLOCK_SKIPPED]:
        return
    layout = layouts[tier]
    low, high = (layout[VALUE_AT], layout[SCORE_AT]) if values else (layout[KEY_AT], layout[VALUE_AT])
    prefetch_bytes(pool[0], block[BLOCK_WHERE] * layout[PAGE_BYTES] + low, high - low)
