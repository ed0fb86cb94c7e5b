"""What a prompt's tokens are worth to the queries that follow: the mean square of the attention that they got.

Attention is a weighted mean of values. Where the value of token `i` is dropped or rounded, the output of query `r` is
off by about `a_r(i) |v_i|` times a factor of the format, and errors of different tokens add up in square. So the mean
of `a^2` counts, and not that of `a`, which DiffKV (arXiv 2412.03131) and H2O (arXiv 2306.14048) rank by: a token that
one query in a hundred attends to with all its weight (a name that is about to be repeated) is worth as much as one that
all queries attend to with a tenth of theirs, though it gets a tenth of the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.kernels.ranking import LEAST_DISTANT, asked_rows

_MOST_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Attention probabilities that are held at a time: what a cache holds, or enough for few launches."""


def mean_squares(q: Tensor, k: Tensor, observe: int, reach: int) -> tuple[Tensor, Tensor]:
    """Mean square attention that each token got, maximum over the GQA group: `(recent, distant)`, fp32 `[R, H, n]`.

    q: `[R, n, Hq, D]`, k: `[R, n, H, D]`, after RoPE. recent: over those of the last `observe` queries that follow the
        token. distant: over up to `observe` queries, evenly chosen, that follow it by `reach` positions or more: what
        it is worth once it is no longer near; where there are too few of those, `recent`.
    """
    length, keys = q.shape[1], k.float().permute(0, 2, 3, 1)
    recent, _ = _mean(q, keys, max(0, length - observe), observe, 1)
    distant, followers = _mean(q, keys, min(reach, length), observe, reach)
    return recent, torch.where(followers >= LEAST_DISTANT, distant, recent)


def _mean(q: Tensor, keys: Tensor, start: int, most: int, distance: int) -> tuple[Tensor, Tensor]:
    """Mean square attention of up to `most` queries, evenly chosen from `start` on, to the tokens at least `distance`
    before them, fp32 `[R, H, n]`, and how many queries that are, int64 `[n]`. keys: fp32 `[R, H, D, n]`.
    """
    requests, heads, _, length = keys.shape
    total, span = torch.zeros(requests, heads, length, device=keys.device), length - start
    position, count = torch.arange(length, device=keys.device), min(most, span)
    row = asked_rows(length, start, most, keys.device)
    chunk = max(1, _MOST_ELEMENTS.get(keys.device.type, 1 << 18) // (requests * q.shape[2] * length))
    for at in range(0, count, chunk):
        visible, own = start + (min(at + chunk, count) - 1) * span // count + 1, row[at : at + chunk]
        square = _squares(q[:, own], keys[..., :visible], own)
        square.masked_fill_(position[:visible] > own[:, None] - distance, 0.0)
        total[..., :visible] += square.sum(2)
    followers = count - torch.searchsorted(row, position + distance)
    return total / followers.clamp_min(1), followers


def _squares(q: Tensor, keys: Tensor, row: Tensor) -> Tensor:
    """q: `[R, m, Hq, D]` at positions `row` `[m]`, keys: fp32 `[R, H, D, n]`; fp32 `[R, H, m, n]`."""
    requests, rows, _, dim = q.shape
    heads, length = keys.shape[1], keys.shape[3]
    query = q.float().view(requests, rows, heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3) * dim**-0.5
    logits = (query @ keys).unflatten(2, (-1, rows))  # [R, H, G, m, n]
    logits.masked_fill_(torch.arange(length, device=keys.device) > row[:, None], -torch.inf)
    return logits.softmax(-1).amax(2).square_()


def pooled(x: Tensor, width: int) -> Tensor:
    """Mean over `width` (odd) neighbouring positions of `x` `[R, H, n]`."""
    return F.avg_pool1d(x.flatten(0, 1), width, 1, width // 2, count_include_pad=False).view(x.shape)
