"""Placing a prompt's tokens into pages: places first, in one pass, then every token on its own, so threads share
nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from siftkv.kernels.numba import threads
from siftkv.kernels.numba.blocks import head_index, table_index
from siftkv.kernels.numba.compile import inner, kernel
from siftkv.kernels.numba.quantize import write_state, write_token
from siftkv.kernels.numba.threads import finish_item, next_item, wait_for_others
from siftkv.kernels.numba.tiles import unpack_dense
from siftkv.kernels.numba.vectors import LANES
from siftkv.kernels.numba.views import (
    DIM,
    FP32,
    KEY_AT,
    KIND,
    NUM_PAGES,
    PAGE_BYTES,
    QUANTISED,
    TOKENS,
    VALUE_AT,
    rows_of,
    views,
)
from siftkv.kernels.reference.condition import condition_keys
from siftkv.kernels.state import CacheState

_CHUNK = 128
"""Tokens of one head that a thread places at a time."""


@kernel
def assign_places(sizes, layouts, pool, ring, slot, layer, tier, places):
    """Slot in tier of every token (`tier`, `places` `[H, n]`); lengths grow and pages are taken, tier after tier,
    head after head.
    """
    tiers, heads, n = len(layouts), tier.shape[0], tier.shape[1]
    for h in range(heads):
        lengths = (head_index(sizes, slot, layer, h)) * tiers
        for t in range(n):
            if tier[h, t] >= 0:
                places[h, t] = pool[5][lengths + tier[h, t]]
                pool[5][lengths + tier[h, t]] += 1
    free_ring, counters = ring
    for index in range(tiers):
        tokens = layouts[index, TOKENS]
        for h in range(heads):
            head_slot, count = head_index(sizes, slot, layer, h), 0
            for t in range(n):
                count += tier[h, t] == index
            length = np.int64(pool[5][head_slot * tiers + index])
            for page in range((length - count + tokens - 1) // tokens, (length + tokens - 1) // tokens):
                at = table_index(sizes, tiers, head_slot, index, page)
                pool[4][at] = free_ring[counters[0] % sizes[NUM_PAGES]]
                counters[0] += 1


@inner
def _dense_copy(layout, dim, pool, page, token, words, at, segment):
    """One row of 16-bit numbers into a page of the same type."""
    target = (page * layout[PAGE_BYTES] + layout[segment]) // 2 + token * dim
    for c in range(dim):
        pool[1][target + c] = words[at + c]


@kernel
def place_tokens(
    worker,
    sizes,
    layouts,
    pool,
    slot,
    layer,
    kind,
    keys,
    values,
    conditioned,
    score,
    position,
    tier,
    places,
    spare,
    progress,
):
    """Encode tokens into their places.

    keys, values: elements of `kind`, as `rows_of` gives them. conditioned: fp32 `[H, n, D]`, empty where no tier is
    quantised. spare: fp32 `[workers, 3, D + 16]`.
    """
    heads, n, dim, tiers = tier.shape[0], tier.shape[1], sizes[DIM], len(layouts)
    chunks = (n + _CHUNK - 1) // _CHUNK
    own, items = spare[worker], heads * chunks
    item = next_item(progress, items)
    while item >= 0:
        h, first = item // chunks, item % chunks * _CHUNK
        head_slot = head_index(sizes, slot, layer, h)
        for t in range(first, min(first + _CHUNK, n)):
            index = np.int64(tier[h, t])
            if index < 0:
                continue
            layout, place = layouts[index], np.int64(places[h, t])
            page = np.int64(pool[4][table_index(sizes, tiers, head_slot, index, place // layout[TOKENS])])
            token = place % layout[TOKENS]
            k_at, v_at = t * keys[2] + h * keys[3], t * values[2] + h * values[3]
            if layout[KIND] == kind and kind != FP32:
                _dense_copy(layout, dim, pool, page, token, keys[0], k_at, KEY_AT)
                _dense_copy(layout, dim, pool, page, token, values[0], v_at, VALUE_AT)
                write_state(layout, pool[1], pool[2], page, token, score[h, t], position[t])
                continue
            if layout[KIND] == QUANTISED:
                for c in range(dim):
                    own[0, c] = conditioned[h, t, c]
            else:
                unpack_dense(own[0], 0, kind, keys[0], keys[1], k_at, dim)
            unpack_dense(own[1], 0, kind, values[0], values[1], v_at, dim)
            write_token(
                layout,
                dim,
                pool[0],
                pool[1],
                pool[2],
                pool[3],
                page,
                token,
                own[0],
                own[1],
                own[2],
                score[h, t],
                position[t],
            )
        finish_item(progress)
        item = next_item(progress, items)
    wait_for_others(worker, progress, items)


def append_tokens(
    state: CacheState, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor, tier: Tensor
) -> None:
    """See `siftkv.kernels.reference.append_tokens`."""
    tokens, heads, dim = k.shape
    if not tokens:
        return
    held, c = views(state), state.conditioning
    conditioned = torch.empty(0, 0, 0)
    if bool((held.layouts[:, KIND] == QUANTISED).any()):
        conditioned = condition_keys(c, k.transpose(0, 1).float(), c.bias[layer][:, None], position)
    kind, keys = rows_of(k)
    _, values = rows_of(v.to(k.dtype))
    tiers = tier.contiguous().numpy()
    places = np.empty(tiers.shape, np.int32)
    assign_places(held.sizes, held.layouts, held.pool, held.ring, slot, layer, tiers, places)
    workers, width = threads.workers(heads * -(-tokens // _CHUNK)), dim + LANES
    spare = held.buffer("spare", workers * 3 * width)[: workers * 3 * width].reshape(workers, 3, width)
    threads.run(
        place_tokens,
        workers,
        held.sizes,
        held.layouts,
        held.pool,
        slot,
        layer,
        kind,
        keys,
        values,
        *(x.contiguous().numpy() for x in (conditioned, score.float(), position)),
        tiers,
        places,
        spare,
        np.zeros(2, np.int64),
    )
