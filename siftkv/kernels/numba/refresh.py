"""New scores at a refresh position, from the probabilities that decode attention just used."""

from __future__ import annotations

import numpy as np

from siftkv.kernels.numba.bits import score_from_bits, stochastic_score_bits
from siftkv.kernels.numba.blocks import (
    BLOCK_COUNT,
    BLOCK_TIER,
    BLOCK_WHERE,
    IN_WINDOW,
    window_counts,
    window_position,
    window_row_of,
)
from siftkv.kernels.numba.compile import inner
from siftkv.kernels.numba.views import PAGE_BYTES, POSITION_AT, POSITIONS, SCORE_AT, SCORES, WINDOW_ROWS


@inner
def _updated_mean(mean, attention, position, now, interval, horizon):
    known = min(max(now - position, 0), horizon)
    weight = np.float32(min(known, interval)) / np.float32(max(known, 1))
    return mean + (attention - mean) * weight


@inner
def refresh_block(block, sizes, layouts, pool, window, slot, head_slot, p, at, p_ld, share, now, rule):
    """`p[at + g * p_ld + t] * share[g]` is the attention of query head g to token t of the block; the maximum over g
    counts. rule: the request's interval and horizon.
    """
    interval, horizon = rule
    tier, where, count = block[BLOCK_TIER], block[BLOCK_WHERE], block[BLOCK_COUNT]
    if tier != IN_WINDOW and not layouts[tier, SCORES]:
        return
    sinks, _, start = window_counts(sizes, window, slot)
    stored = positions = 0
    has_positions = False
    if tier != IN_WINDOW:
        stored = (where * layouts[tier, PAGE_BYTES] + layouts[tier, SCORE_AT]) // 2
        positions = (where * layouts[tier, PAGE_BYTES] + layouts[tier, POSITION_AT]) // 4
        has_positions = layouts[tier, POSITIONS] != 0
    for t in range(count):
        attention = np.float32(0)
        for g in range(len(share)):
            attention = max(attention, p[at + g * p_ld + t] * share[g])
        if tier == IN_WINDOW:
            position = window_position(where + t, sinks, start)
            row = head_slot * sizes[WINDOW_ROWS] + window_row_of(sizes, window, slot, position)
            window[4][row] = _updated_mean(window[4][row], attention, position, now, interval, horizon)
        else:
            position = np.int64(pool[2][positions + t]) if has_positions else 0
            mean = _updated_mean(score_from_bits(pool[1][stored + t]), attention, position, now, interval, horizon)
            pool[1][stored + t] = stochastic_score_bits(mean, position, now)
