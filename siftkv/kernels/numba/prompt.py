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

_CHUNK_FLOATS = 1 << 19
"""Logits that are held at a time: 2 MiB, a second-level cache."""


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

    `lse` is not read: here a row's largest logit and sum come from the cache that holds the row anyway.
    """
    tokens, heads, dim = k.shape
    group = q.shape[1] // heads
    keys, queries = k.transpose(0, 1).float().contiguous(), q[rows].float().view(-1, heads, group, dim)
    width = -(-tokens // LANES) * LANES
    chunk = max(1, min(len(rows), _CHUNK_FLOATS // (group * width)))
    workers = threads.workers(chunk)
    totals = np.zeros((heads, workers, width), np.float32)
    logits = torch.empty(chunk * group * width)
    row_ids, weights, scale = (
        rows.contiguous().numpy(),
        weight.float().contiguous().numpy(),
        np.float32(_LOG2E / math.sqrt(dim)),
    )
    for at in range(0, len(rows), chunk):
        part = slice(at, min(at + chunk, len(rows)))
        visible = int(row_ids[part.stop - 1]) + 1
        ld = -(-visible // LANES) * LANES
        count = (part.stop - at) * group
        for head in range(heads):
            product = logits[: count * ld].view(count, ld)[:, :visible]
            with _products_of(q.dtype):
                torch.mm(queries[part, head].reshape(count, dim), keys[head, :visible].T, out=product)
            rest = (group, scale, totals[head], np.zeros(2, np.int64))
            threads.run(accumulate_attention, workers, logits.numpy(), ld, row_ids[part], weights[part], *rest)
    return torch.from_numpy(totals.sum(1)[:, :tokens]) / _followers(rows, weight, tokens)


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
