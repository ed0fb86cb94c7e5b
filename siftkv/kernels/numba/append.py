"""Placing a prompt's tokens into pages: places first, in one pass, then every token on its own, so threads share
nothing.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from siftkv.kernels.numba import threads
from siftkv.kernels.numba.blocks import head_index, table_index
from siftkv.kernels.numba.compile import kernel
from siftkv.kernels.numba.quantize import write_token
from siftkv.kernels.numba.threads import finish_item, next_item, wait_for_others
from siftkv.kernels.numba.vectors import LANES
from siftkv.kernels.numba.views import DIM, KIND, NUM_PAGES, QUANTISED, TOKENS, views
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


@kernel
def place_tokens(
    worker,
    sizes,
    layouts,
    pool,
    slot,
    layer,
    plain,
    conditioned,
    values,
    score,
    position,
    tier,
    places,
    spare,
    progress,
):
    """Encode tokens into their places: plain, conditioned and values fp32 `[H, n, D]`; spare fp32 `[workers, 3, D +
    16]`.
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
            layout, keys = layouts[index], conditioned if layouts[index, KIND] == QUANTISED else plain
            for c in range(dim):
                own[0, c], own[1, c] = keys[h, t, c], values[h, t, c]
            place = np.int64(places[h, t])
            page = np.int64(pool[4][table_index(sizes, tiers, head_slot, index, place // layout[TOKENS])])
            write_token(
                layout,
                dim,
                pool[0],
                pool[1],
                pool[2],
                pool[3],
                page,
                place % layout[TOKENS],
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
    held, c = views(state), state.conditioning
    plain, values = k.transpose(0, 1).float(), v.transpose(0, 1).float()
    quantised = bool((held.layouts[:, KIND] == QUANTISED).any())
    conditioned = condition_keys(c, plain, c.bias[layer][:, None], position) if quantised else plain
    tiers = tier.contiguous().numpy()
    heads, tokens, dim = plain.shape
    places = np.empty(tiers.shape, np.int32)
    assign_places(held.sizes, held.layouts, held.pool, held.ring, slot, layer, tiers, places)
    workers, width = threads.workers(heads * -(-tokens // _CHUNK)), dim + LANES
    spare = held.buffer("spare", workers * 3 * width)[: workers * 3 * width].reshape(workers, 3, width)
    content = [x.contiguous().numpy() for x in (plain, conditioned, values, score.float(), position)]
    threads.run(
        place_tokens,
        workers,
        held.sizes,
        held.layouts,
        held.pool,
        slot,
        layer,
        *content,
        tiers,
        places,
        spare,
        np.zeros(2, np.int64),
    )
