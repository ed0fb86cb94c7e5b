"""The weighted sum of one block's values."""

from __future__ import annotations

import numpy as np

from siftkv.kernels.numba.blocks import (
    BLOCK_COUNT,
    BLOCK_TIER,
    BLOCK_WHERE,
    IN_WINDOW,
)
from siftkv.kernels.numba.compile import inlined, inner
from siftkv.kernels.numba.dots import (
    bf16_values,
    codes2_values,
    codes4_values,
    codes8_values,
    fp32_values,
    plane_values,
)
from siftkv.kernels.numba.logits import TILE_TOKENS, unpack_page_rows, unpack_window
from siftkv.kernels.numba.tiles import (
    padded,
    unpack_compact,
    unpack_meta,
    unpack_meta_exact,
)
from siftkv.kernels.numba.vectors import (
    LANES,
    fma16,
    lanes_sum,
    load16,
    mul16,
    splat16,
    store16,
)
from siftkv.kernels.numba.views import (
    BF16,
    COMPACT,
    DIM,
    KIND,
    PAGE_BYTES,
    QUANTISED,
    TOKENS,
    VALUE_AT,
    VALUE_BITS,
    VALUE_GROUPS,
    VALUE_META_AT,
    VALUE_ROW,
)

SLICES = 8
"""The most value groups a token can have: what zero-points add is summed for each such slice of channels."""


@inlined
def block_values(
    block, sizes, layouts, pool, window, slot, head_slot, p, at, p_ld, group, ld, space, sums, offset, out
):
    """Add a block's values times `p`: quantised ones to partial `sums` a channel and to `offset` a slice, dense ones
    to `out`.
    """
    tier, where, count = block[BLOCK_TIER], block[BLOCK_WHERE], block[BLOCK_COUNT]
    if tier >= 0 and layouts[tier, KIND] == QUANTISED:
        _quantised_values(layouts[tier], where, count, sizes[DIM], pool, p, at, p_ld, group, ld, space, sums, offset)
        return
    if tier >= 0 and layouts[tier, KIND] == BF16 and ld == sizes[DIM]:
        start = (where * layouts[tier, PAGE_BYTES] + layouts[tier, VALUE_AT]) // 2
        bf16_values(out, pool[1], start, ld, count, p, at, p_ld, group, ld)
        return
    tile = space[0]
    for first in range(0, count, TILE_TOKENS):
        rows = min(TILE_TOKENS, count - first)
        if tier == IN_WINDOW:
            unpack_window(sizes, window, slot, head_slot, where + first, rows, True, tile, ld)
        else:
            unpack_page_rows(layouts[tier], pool, where, True, first, rows, sizes[DIM], tile, ld)
        fp32_values(out, tile, 0, ld, rows, p, at + first, p_ld, group, ld)


@inlined
def _quantised_values(layout, page, count, dim, pool, p, at, p_ld, group, ld, space, sums, offset):
    scale, zero, weight = space[1], space[2], space[3]
    groups, tokens, bits = layout[VALUE_GROUPS], layout[TOKENS], layout[VALUE_BITS]
    start = page * layout[PAGE_BYTES] + layout[VALUE_META_AT]
    if layout[COMPACT]:
        unpack_compact(scale, zero, pool[0], start, count * groups, bits)
    elif start // 4 + padded(count * groups) <= len(pool[2]):
        unpack_meta(scale, zero, pool[2], start // 4, count * groups)
    else:
        unpack_meta_exact(scale, zero, pool[1], start // 2, count * groups)
    width, weight_ld = dim // groups, padded(count)
    codes = page * layout[PAGE_BYTES] + layout[VALUE_AT]
    slices = SLICES // groups
    for i in range(groups):
        for g in range(group):
            added = _weigh(weight, g * weight_ld, p, at + g * p_ld, scale, zero, i, groups, count)
            for part in range(i * slices, (i + 1) * slices):
                offset[g * SLICES + part] += added
        if groups > 1 or bits == 1:
            row, mask = layout[VALUE_ROW], np.int32((1 << bits) - 1)
            for c in range(i * width, (i + 1) * width):
                shift, start = np.int32(c // row * bits), codes + c % row * tokens
                plane_values(sums, c, 1, ld, 0, pool[0], start, 0, count, weight, weight_ld, group, shift, mask)
    if groups == 1:
        _all_channels(layout[VALUE_ROW], bits, sums, ld, pool[0], codes, tokens, count, weight, weight_ld, group)


@inlined
def _all_channels(row, bits, sums, ld, pool8, codes, tokens, count, weight, weight_ld, group):
    none = np.int32(0)
    if bits == 8:
        codes8_values(sums, 0, row, ld, row, pool8, codes, tokens, count, weight, weight_ld, group, none, none)
    elif bits == 4:
        codes4_values(sums, 0, row, ld, row, pool8, codes, tokens, count, weight, weight_ld, group, none, none)
    elif bits == 2:
        codes2_values(sums, 0, row, ld, row, pool8, codes, tokens, count, weight, weight_ld, group, none, none)


@inner
def _weigh(weight, to, p, at, scale, zero, i, groups, count):
    """`weight[t] = p[t] * scale[t, i]`, zero up to a whole vector; returns the sum of `p[t] * zero[t, i]`."""
    whole = count // LANES * LANES if groups == 1 else 0
    parts = splat16(np.float32(0))
    for t in range(0, whole, LANES):
        here = load16(p, at + t)
        store16(weight, to + t, mul16(here, load16(scale, t)))
        parts = fma16(here, load16(zero, t), parts)
    added = lanes_sum(parts)
    for t in range(whole, count):
        weight[to + t] = p[at + t] * scale[t * groups + i]
        added += p[at + t] * zero[t * groups + i]
    for t in range(count, padded(count)):
        weight[to + t] = 0.0
    return added


@inner
def finish_values(sums, offset, out, group, dim, ld):
    """Fold the partial sums and the zero-points' share into `out`."""
    width = dim // SLICES
    for g in range(group):
        for c in range(dim):
            out[g * ld + c] += lanes_sum(load16(sums, (g * ld + c) * LANES)) + offset[g * SLICES + c // width]
