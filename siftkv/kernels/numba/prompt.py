"""Importance of prompt tokens: products by PyTorch in chunks that stay in cache, then one fused pass of softmax,
maximum over the group and sum.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siftkv.kernels.numba import threads
from siftkv.kernels.numba.compile import inner, kernel
from siftkv.kernels.numba.threads import finish_item, next_item, wait_for_others
from siftkv.kernels.numba.tiles import padded
from siftkv.kernels.numba.vectors import (
    LANES,
    add16,
    exp2_16,
    fma16,
    lanes_max,
    lanes_sum,
    load16,
    max16,
    mul16,
    splat16,
    store16,
)

_LOG2E = 1.0 / math.log(2.0)

_SETTING = threading.Lock()

_CHUNK_FLOATS = 1 << 20
"""Logits that are held at a time: 4 MiB, two second-level caches; fewer would make products too small to be fast."""

_BLOCK_KEYS = 512

Ids = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@inner
def _exponentials(logits, at, count, scale):
    """In place `2 ** ((logit - largest) * scale)`, zero up to a whole vector; returns the sum."""
    for t in range(count, padded(count)):
        logits[at + t] = -np.inf
    largest = load16(logits, at)
    for t in range(LANES, count, LANES):
        largest = max16(load16(logits, at + t), largest)
    factor, shift = splat16(scale), splat16(np.float32(-lanes_max(largest) * scale))
    total = splat16(np.float32(0))
    for t in range(0, count, LANES):
        p = exp2_16(fma16(load16(logits, at + t), factor, shift))
        store16(logits, at + t, p)
        total = add16(total, p)
    for t in range(count, padded(count)):
        logits[at + t] = 0.0
    return lanes_sum(total)


@inner
def _largest_share(logits, base, width, group, count, scale, weight, own):
    """Add the weighted maximum over the group of one query row's attention to `own`."""
    for g in range(group):
        share = weight / _exponentials(logits, base + g * width, count, scale)
        factor = splat16(np.float32(share))
        for t in range(base, base + count, LANES):
            here = mul16(load16(logits, t + g * width), factor)
            if g > 0:
                here = max16(here, load16(logits, t))
            if g == group - 1:
                at = t - base
                store16(own, at, add16(here, load16(own, at)))
            else:
                store16(logits, t, here)


@kernel
def accumulate_known(worker, logits, width, first, last, rows, weight, scale, shifts, totals, progress):
    """`accumulate_attention` of the keys `[first, last)` where each query's log-sum-exp is known: `shifts` fp32
    `[M, group]` is minus that, in base two. One pass, and one exponential a group: the largest share is that of the
    largest exponent. Every row stands behind `first`.
    """
    own, items, group, factor = totals[worker], len(rows), shifts.shape[1], splat16(scale)
    item = next_item(progress, items)
    while item >= 0:
        base, count, share = item * group * width, min(rows[item], last) - first, splat16(weight[item])
        whole = count // LANES * LANES
        for t in range(0, whole, LANES):
            p = exp2_16(_largest_exponent(logits, base + t, width, factor, shifts[item]))
            store16(own, first + t, fma16(share, p, load16(own, first + t)))
        if whole < count:
            store16(logits, base + whole, exp2_16(_largest_exponent(logits, base + whole, width, factor, shifts[item])))
            for t in range(whole, count):
                own[first + t] += weight[item] * logits[base + t]
        finish_item(progress)
        item = next_item(progress, items)
    wait_for_others(worker, progress, items)


@inner
def _largest_exponent(logits, at, width, factor, shifts):
    largest = fma16(load16(logits, at), factor, splat16(shifts[0]))
    for g in range(1, len(shifts)):
        largest = max16(fma16(load16(logits, at + g * width), factor, splat16(shifts[g])), largest)
    return largest


@kernel
def accumulate_attention(worker, logits, width, rows, weight, group, scale, totals, progress):
    """Add `weight[r]` times each earlier token's largest attention over the group to a worker's row of `totals`, for
    query rows `rows` `[M]`.

    logits: fp32, flat `[M, group, width]`, width a multiple of 16. totals: fp32 `[workers, at least width]`.
    """
    own, items = totals[worker], len(rows)
    item = next_item(progress, items)
    while item >= 0:
        before = rows[item]
        itself = own[before]
        _largest_share(logits, item * group * width, width, group, before + 1, scale, weight[item], own)
        own[before] = itself
        finish_item(progress)
        item = next_item(progress, items)
    wait_for_others(worker, progress, items)


def prompt_importance(q: Tensor, k: Tensor, rows: Tensor, weight: Tensor, lse: Tensor | None = None) -> Tensor:
    """See `siftkv.kernels.reference.prompt_importance`.

    With `lse` the logits are read once, block by block; without it a row's largest logit and sum come from the cache
    that holds it.
    """
    tokens, heads, dim = k.shape
    group, scale = q.shape[1] // heads, np.float32(_LOG2E / math.sqrt(dim))
    keys = k.transpose(0, 1).float().contiguous()
    queries = q[rows].view(-1, heads, group, dim).transpose(0, 1).float().contiguous()
    measured = (rows.contiguous().numpy(), weight.float().contiguous().numpy())
    if lse is None:
        totals = _of_rows(queries, keys, *measured, scale, q.dtype)
    else:
        totals = _of_blocks(queries, keys, *measured, scale, q.dtype, _shifts(lse, rows, heads))
    return torch.from_numpy(totals.sum(1)[:, :tokens]) / _followers(rows, weight, tokens)


def _of_rows(
    queries: Tensor, keys: Tensor, row_ids: Ids, weights: Floats, scale: np.float32, dtype: torch.dtype
) -> Floats:
    """Attention sums fp32 `[H, workers, N]` of queries `[H, M, group, D]` to keys `[H, N, D]`, a row at a time;
    both fp32, from elements of `dtype`.
    """
    heads, rows, group, dim = queries.shape
    width = _padded_width(keys.shape[1])
    chunk = max(1, min(rows, _CHUNK_FLOATS // (group * width)))
    workers = threads.workers(chunk)
    totals = np.zeros((heads, workers, width), np.float32)
    logits = torch.empty(chunk * group * width)
    for at in range(0, rows, chunk):
        part = slice(at, min(at + chunk, rows))
        visible, count = int(row_ids[part.stop - 1]) + 1, (part.stop - at) * group
        ld = _padded_width(visible)
        for head in range(heads):
            product = logits[: count * ld].view(count, ld)[:, :visible]
            with _products_of(dtype):
                torch.mm(queries[head, part].view(count, dim), keys[head, :visible].T, out=product)
            given = (logits.numpy(), ld, row_ids[part], weights[part], group, scale, totals[head])
            threads.run(accumulate_attention, workers, *given, np.zeros(2, np.int64))
    return totals


def _of_blocks(
    queries: Tensor, keys: Tensor, row_ids: Ids, weights: Floats, scale: np.float32, dtype: torch.dtype, shifts: Floats
) -> Floats:
    """As `_of_rows`, in blocks of keys: fewer and squarer products, whose results stay in cache."""
    heads, rows, group, dim = queries.shape
    tokens = keys.shape[1]
    chunk = max(1, _CHUNK_FLOATS // (group * _BLOCK_KEYS))
    workers = threads.workers(min(chunk, max(1, rows)))
    totals = np.zeros((heads, workers, _padded_width(tokens)), np.float32)
    logits = torch.empty(min(chunk, rows) * group * _BLOCK_KEYS)
    for at in range(0, rows, chunk):
        for first in range(0, tokens, _BLOCK_KEYS):
            last, stop = min(first + _BLOCK_KEYS, tokens), min(at + chunk, rows)
            part = slice(max(at, int(np.searchsorted(row_ids, first, "right"))), stop)
            if part.start >= stop:
                break
            count, ld = (stop - part.start) * group, _padded_width(last - first)
            product = logits[: count * ld].view(count, ld)[:, : last - first]
            for head in range(heads):
                with _products_of(dtype):
                    torch.mm(queries[head, part].view(count, dim), keys[head, first:last].T, out=product)
                given = (logits.numpy(), ld, first, last, row_ids[part], weights[part], scale, shifts[head, part])
                threads.run(accumulate_known, workers, *given, totals[head], np.zeros(2, np.int64))
    return totals


def _padded_width(count: int) -> int:
    """`count` rounded up to whole vectors."""
    return -(-count // LANES) * LANES


def _shifts(lse: Tensor, rows: Tensor, heads: int) -> Floats:
    """fp32 `[H, M, group]`: minus the log-sum-exp `[Hq, N]` of the query rows, in base two."""
    held = lse[:, rows].view(heads, -1, len(rows)).transpose(1, 2)
    return (held * -_LOG2E).contiguous().numpy()


@contextmanager
def _products_of(dtype: torch.dtype) -> Iterator[None]:
    """Let oneDNN multiply numbers that come from bf16 as bf16: nothing is lost, sums stay fp32, and CPUs with matrix
    units are twice as fast.

    A bf16 product in PyTorch would round the logits. The setting is the process's, so it is put back after each
    product.
    """
    settings: Any = torch.backends.mkldnn
    settings = settings.matmul
    if dtype != torch.bfloat16:
        yield
        return
    with _SETTING:
        held, settings.fp32_precision = settings.fp32_precision, "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = held


def _followers(rows: Tensor, weight: Tensor, tokens: int) -> Tensor:
    """Summed weight of the query rows behind each token: fp32 `[tokens]`, a tiny number where there are none."""
    at = torch.zeros(tokens).index_add_(0, rows, weight.float())
    return (at.flip(0).cumsum(0).flip(0) - at).clamp_min(torch.finfo(torch.float32).tiny)
