"""Decode attention on the CPU: items of all heads in one queue, drained by the worker threads; who ends a head's last
item merges the head.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siftkv.kernels.numba import threads
from siftkv.kernels.numba.blocks import (
    BLOCK_AT,
    BLOCK_COLUMNS,
    BLOCK_SKIPPED,
    HEAD_COLUMNS,
    HEAD_FIRST,
    HEAD_ITEMS,
    HEAD_PENDING,
    ITEM_AT,
    ITEM_COLUMNS,
    ITEM_END,
    ITEM_HEAD,
    ITEM_START,
    MAX_BLOCKS,
    WINDOW_BLOCK,
    append_rows,
    head_index,
    item_width,
    list_blocks,
    plan_items,
)
from siftkv.kernels.numba.compile import inlined, inner, kernel
from siftkv.kernels.numba.logits import (
    TILE_TOKENS,
    add_bias,
    add_weights,
    block_logits,
    prefetch_block,
    skip_logits,
    softmax_rows,
)
from siftkv.kernels.numba.refresh import refresh_block
from siftkv.kernels.numba.threads import finish_item, next_item, wait_for_others
from siftkv.kernels.numba.tiles import padded
from siftkv.kernels.numba.values import SLICES, block_values, finish_values
from siftkv.kernels.numba.vectors import LANES, fetch_add
from siftkv.kernels.numba.views import DIM, HEADS, TOKENS, Views, views, words
from siftkv.kernels.reference.attention import append_queries
from siftkv.kernels.state import CacheState

_LOG2E = 1.0 / math.log(2.0)

_ALONE = 2048
"""Tokens, all heads together, that one thread does faster than it wakes another."""


@inlined
def _run_item(index, job, blocks, lanes, space):
    """Partial result of one item: `p` in place of its logits, maximum, sum and unnormalised output of each query
    head.
    """
    (
        layer,
        slots,
        q,
        q_rotated,
        sizes,
        layouts,
        pool,
        window,
        _,
        rotary,
        items,
        _,
        logits,
        part,
        peaks,
        totals,
        _,
        _,
    ) = job
    item, dim = items[index], sizes[DIM]
    group, ld = q.shape[1], padded(dim)
    b, h = item[ITEM_HEAD] // sizes[HEADS], item[ITEM_HEAD] % sizes[HEADS]
    slot, row = slots[b], item[ITEM_HEAD]
    head_slot = head_index(sizes, slot, layer, h)
    count = item[ITEM_END] - item[ITEM_START]
    at, width = item[ITEM_AT] * group, item_width(count)
    plain, turned, q_sum, sums, offset = lanes
    _load_queries(q[row], q_rotated[row], plain, turned, q_sum, ld)
    made = list_blocks(sizes, layouts, pool, window, slot, head_slot, item, blocks)
    for i in range(made):
        block = blocks[i]
        # The last block's keys are followed by the first block's values.
        prefetch_block(blocks[(i + 1) % made], layouts, pool, i + 1 == made)
        to = at + block[BLOCK_AT]
        if block[BLOCK_SKIPPED]:
            skip_logits(block, group, logits, to, width)
            continue
        block_logits(
            block,
            sizes,
            layouts,
            pool,
            window,
            slot,
            head_slot,
            plain,
            turned,
            q_sum,
            group,
            ld,
            space,
            logits,
            to,
            width,
        )
        add_bias(block, layouts, pool, rotary, layer, h, plain, group, dim, ld, sums, logits, to, width)
        add_weights(block, layouts, pool, group, logits, to, width)
    softmax_rows(logits, at, count, width, group, peaks[index], totals[index])
    out = part[index]
    out[:], sums[:], offset[:] = 0.0, 0.0, 0.0
    for i in range(made):
        block = blocks[i]
        if i + 1 < made:
            prefetch_block(blocks[i + 1], layouts, pool, True)
        if block[BLOCK_SKIPPED]:
            continue
        to = at + block[BLOCK_AT]
        block_values(
            block, sizes, layouts, pool, window, slot, head_slot, logits, to, width, group, ld, space, sums, offset, out
        )
    finish_values(sums, offset, out, group, dim, ld)


@inner
def _load_queries(q, q_rotated, plain, turned, q_sum, ld):
    for g in range(q.shape[0]):
        q_sum[g] = 0.0
        for c in range(q.shape[1]):
            plain[g * ld + c], turned[g * ld + c] = q[g, c], q_rotated[g, c]
            q_sum[g] += q_rotated[g, c]


@inner
def _merge_head(row, job, blocks):
    """Output of one head from its items; new scores where the request is at a refresh position."""
    (layer, slots, q, _, sizes, layouts, pool, window, rules, _, items, heads, logits, part, peaks, totals, out, _) = (
        job
    )
    group, dim, ld = q.shape[1], sizes[DIM], padded(sizes[DIM])
    first, last = heads[row, HEAD_FIRST], heads[row, HEAD_FIRST] + heads[row, HEAD_ITEMS]
    for g in range(group):
        peak, total = peaks[first, g], np.float32(0)
        for i in range(first + 1, last):
            peak = max(peak, peaks[i, g])
        for i in range(first, last):
            peaks[i, g] = np.exp2(peaks[i, g] - peak)
            total += peaks[i, g] * totals[i, g]
        out[row, g] = 0.0
        for i in range(first, last):
            peaks[i, g] /= total
            for c in range(dim):
                out[row, g, c] += peaks[i, g] * part[i, g * ld + c]
    slot = slots[row // sizes[HEADS]]
    now, rule = window[5][slot], (rules[1][slot], rules[6][slot])
    if rule[0] <= 0 or now % rule[0]:
        return
    head_slot = head_index(sizes, slot, layer, row % sizes[HEADS])
    for i in range(first, last):
        item = items[i]
        width = item_width(item[ITEM_END] - item[ITEM_START])
        made = list_blocks(sizes, layouts, pool, window, slot, head_slot, item, blocks)
        for n in range(made):
            at = item[ITEM_AT] * group + blocks[n, BLOCK_AT]
            if blocks[n, BLOCK_SKIPPED]:
                continue
            refresh_block(
                blocks[n], sizes, layouts, pool, window, slot, head_slot, logits, at, width, peaks[i], now, rule
            )


@kernel
def _attend(worker, job, tables, floats, cuts):
    """Take items from the queue until it is empty."""
    (_, _, _, _, _, _, _, _, _, _, items, heads, _, _, _, _, _, progress) = job
    blocks, own, c = tables[worker], floats[worker], cuts
    space = (own[c[0] : c[1]], own[c[1] : c[2]], own[c[2] : c[3]], own[c[3] : c[4]])
    lanes = (own[c[4] : c[5]], own[c[5] : c[6]], own[c[6] : c[7]], own[c[7] : c[8]], own[c[8] : c[9]])
    index = next_item(progress, len(items))
    while index >= 0:
        _run_item(index, job, blocks, lanes, space)
        row = items[index, ITEM_HEAD]
        if fetch_add(heads, row * HEAD_COLUMNS + HEAD_PENDING, -1) == 1:
            _merge_head(row, job, blocks)
        finish_item(progress)
        index = next_item(progress, len(items))
    wait_for_others(worker, progress, len(items))


def _work_space(held: Views, group: int) -> Any:
    """Where each part of a worker's floats starts: tile, scales, zero-points, weights; queries, rotated ones, their
    sums, sums a channel, a slice.
    """
    ld = -(-int(held.sizes[DIM]) // LANES) * LANES
    tokens = -(-max(WINDOW_BLOCK, *held.layouts[:, TOKENS].tolist(), 0) // LANES) * LANES
    meta = tokens * SLICES + LANES
    space = [(TILE_TOKENS + 1) * ld, meta, meta, tokens * group]
    lanes = [group * ld, group * ld, group, group * ld * LANES, group * SLICES]
    return np.cumsum([0, *space, *lanes])


@kernel
def _prepare(sizes, layouts, pool, window, slots, layer, k, v, items, heads):
    append_rows(sizes, window, slots, layer, k, v)
    return plan_items(sizes, layouts, pool, window, slots, layer, items, heads)


def decode_attention(state: CacheState, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """See `siftkv.kernels.reference.decode_attention`."""
    held, c = views(state), state.conditioning
    batch, heads, dim = k.shape
    group, rows = q.shape[1] // heads, batch * heads
    append_queries(state, layer, slots, q)
    scaled = (q.float() * (_LOG2E / math.sqrt(dim))).contiguous()
    rotated = scaled @ c.rotation if c.rotates else scaled
    out = torch.empty(batch, heads * group, dim, dtype=torch.float32)
    if not rows:
        return out.to(q.dtype)
    new_k, new_v = (words(x.to(state.window_k.dtype).contiguous()) for x in (k, v))
    slot_ids = slots.contiguous().numpy()
    table = held.buffer("heads", rows * HEAD_COLUMNS, np.int64)[: rows * HEAD_COLUMNS].reshape(rows, HEAD_COLUMNS)
    items, size = _plan(held, slot_ids, layer, new_k, new_v, table)
    made, ld = len(items), -(-dim // LANES) * LANES
    part = held.buffer("part", made * group * ld)[: made * group * ld].reshape(made, group * ld)
    peaks, totals = (held.buffer(x, made * group)[: made * group].reshape(made, group) for x in ("peaks", "totals"))
    job: tuple[Any, ...] = (
        layer,
        slot_ids,
        scaled.view(rows, group, dim).numpy(),
        rotated.view(rows, group, dim).numpy(),
    )
    job += (held.sizes, held.layouts, held.pool, held.window, held.rules, held.rotary, items, table)
    job += (held.buffer("logits", size * group + 4 * LANES), part, peaks, totals)
    job += (out.view(rows, group, dim).numpy(), np.zeros(2, np.int64))
    _run(held, job, made, size, group)
    return out.to(q.dtype)


def _plan(held: Views, slots: Any, layer: int, k: Any, v: Any, heads: Any) -> tuple[Any, int]:
    """Append the new tokens to the window and cut the work into items: the table of items, and logits a query head
    needs.
    """
    capacity = len(heads) * 2
    while True:
        items = held.buffer("items", capacity * ITEM_COLUMNS, np.int64)
        items = items[: len(items) // ITEM_COLUMNS * ITEM_COLUMNS].reshape(-1, ITEM_COLUMNS)
        made, size = _prepare(held.sizes, held.layouts, held.pool, held.window, slots, layer, k, v, items, heads)
        if made <= len(items):
            return items[:made], size
        capacity = made


def _run(held: Views, job: Any, items: int, tokens: int, group: int) -> None:
    workers = threads.workers(items) if tokens > _ALONE else 1
    space = held.spaces.get((workers, group))
    if space is None:
        cuts = _work_space(held, group)
        tables = np.zeros((workers, MAX_BLOCKS, BLOCK_COLUMNS), np.int64)
        space = held.spaces[workers, group] = (tables, np.zeros((workers, cuts[-1]), np.float32), cuts)
    threads.run(_attend, workers, job, *space)
