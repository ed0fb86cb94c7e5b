"""Carrying out a plan: each head slot's token goes from the window down the tiers, taking a place in one and what it
displaces further.
"""

from __future__ import annotations

import numpy as np

from siftkv.kernels.numba.bits import dense_value
from siftkv.kernels.numba.blocks import head_index, table_index, window_row_of
from siftkv.kernels.numba.compile import inner, kernel
from siftkv.kernels.numba.plan import ACTION, APPEND, NOTHING, OVERWRITE, REMOVE, RETURNS, VICTIM
from siftkv.kernels.numba.quantize import copy_token, read_token, write_token
from siftkv.kernels.numba.threads import finish_item, next_item, wait_for_others
from siftkv.kernels.numba.views import DIM, FP32, HEADS, LAYERS, TOKENS, WINDOW_KIND, WINDOW_ROWS


@inner
def _load_leaving(sizes, window, element, k, v):
    kind = sizes[WINDOW_KIND]
    for c in range(sizes[DIM]):
        if kind == FP32:
            k[c], v[c] = window[1][element + c], window[3][element + c]
        else:
            k[c], v[c] = dense_value(kind, window[0][element + c]), dense_value(kind, window[2][element + c])


@inner
def _subtract_bias(rotary, layer, head, position, k, dim):
    """`k - RoPE_p(b_r)` where the bias is not zero."""
    half, inside = dim // 2, min(max(position, 0), len(rotary[0]) - 1)
    for r in range(rotary[4][layer, head]):
        pair = rotary[3][layer, head, r]
        cos, sin = rotary[0][inside, pair], rotary[1][inside, pair]
        low, high = rotary[2][layer, head, pair], rotary[2][layer, head, pair + half]
        k[pair] -= low * cos - high * sin
        k[pair + half] -= high * cos + low * sin


@inner
def _page(sizes, pool, tiers, head_slot, tier, index):
    return np.int64(pool[4][table_index(sizes, tiers, head_slot, tier, index)])


@inner
def _commit_tier(sizes, layouts, pool, free_ring, head_slot, tier, plan, carried, displaced, codes):
    """One tier's plan: `carried` and `displaced` are (k, v) rows; returns score and position of what was displaced,
    if anything was.
    """
    layout, dim, tiers, action = layouts[tier], sizes[DIM], len(layouts), plan[ACTION]
    tokens, length = layout[TOKENS], np.int64(pool[5][head_slot * tiers + tier])
    k, v, score, position = carried
    place = length if action == APPEND else plan[VICTIM]
    page = _page(sizes, pool, tiers, head_slot, tier, place // tokens)
    out_score, out_position = score, position
    if action != APPEND:
        out_score, out_position = read_token(
            layout, dim, pool[0], pool[1], pool[2], pool[3], page, place % tokens, displaced[0], displaced[1]
        )
    if action == REMOVE:
        last = length - 1
        source = _page(sizes, pool, tiers, head_slot, tier, last // tokens)
        copy_token(layout, pool[0], source, last % tokens, page, place % tokens)
        if plan[RETURNS] >= 0:
            free_ring[plan[RETURNS]] = source
            emptied = table_index(sizes, tiers, head_slot, tier, last // tokens)
            pool[4][emptied] = -1
            if len(pool[6]):
                pool[6][emptied] = 0
    else:
        write_token(layout, dim, pool[0], pool[1], pool[2], pool[3], page, place % tokens, k, v, codes, score, position)
    if action != OVERWRITE:
        pool[5][head_slot * tiers + tier] += 1 if action == APPEND else -1
    return out_score, out_position


@kernel
def commit_tiers(
    worker,
    slots,
    leaving,
    tiers_from,
    tiers_to,
    sizes,
    layouts,
    pool,
    window,
    rotary,
    free_ring,
    plans,
    carried,
    spare,
    progress,
):
    """Tiers `[tiers_from, tiers_to)` of every plan; an item is one layer of one request.

    carried: keys and values fp32 `[rows, D + 16]`, scores fp32 and positions int64 `[rows]`, a row a head slot.
    leaving: load the tokens that leave the
    window first. If not all tiers are done, the key bias is subtracted last, so that only the rotation is left to do.
    spare: fp32 `[workers, 3, D + 16]`.
    """
    keys, values, scores, positions = carried
    items, heads = len(slots) * sizes[LAYERS], sizes[HEADS]
    own = spare[worker]
    item = next_item(progress, items)
    while item >= 0:
        b, layer = item // sizes[LAYERS], item % sizes[LAYERS]
        start = window[6][slots[b]]
        for h in range(heads):
            head_slot, row, plan = head_index(sizes, slots[b], layer, h), item * heads + h, plans[b, layer, h]
            if not _any_action(plan):
                continue
            if leaving:
                at = head_slot * sizes[WINDOW_ROWS] + window_row_of(sizes, window, slots[b], start)
                _load_leaving(sizes, window, at * sizes[DIM], keys[row], values[row])
                scores[row], positions[row] = window[4][at], start
            for tier in range(tiers_from, tiers_to):
                if plan[tier, ACTION] == NOTHING:
                    continue
                token = (keys[row], values[row], scores[row], positions[row])
                scores[row], positions[row] = _commit_tier(
                    sizes, layouts, pool, free_ring, head_slot, tier, plan[tier], token, (own[0], own[1]), own[2]
                )
                if plan[tier, ACTION] != APPEND:
                    for c in range(sizes[DIM]):
                        keys[row, c], values[row, c] = own[0, c], own[1, c]
            if tiers_to < len(layouts):
                _subtract_bias(rotary, layer, h, positions[row], keys[row], sizes[DIM])
        finish_item(progress)
        item = next_item(progress, items)
    wait_for_others(worker, progress, items)


@inner
def _any_action(plan):
    actions = 0
    for tier in range(len(plan)):
        actions += plan[tier, ACTION] != NOTHING
    return actions > 0
