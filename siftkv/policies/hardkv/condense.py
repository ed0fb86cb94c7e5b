"""What becomes of tokens that lose their place: they are dropped, or merged into those that stay.

A merged token stands for several: its key and value are means weighted by the attention of a reference query, and a
log-weight makes up for what the mean of keys loses. With `z_j = q . k_j / sqrt(D) + w_j` and `a = softmax(z)` over a
group, `k = sum a_j k_j`, `v = sum a_j v_j` and `w = logsumexp(z) - q . k / sqrt(D)`, so that at `q` the group's share
of the softmax sum and of the output is exactly what it was. Means alone always lose some of the sum (Jensen); Hard-KV
(arXiv 2606.28831), appendix G, has no such weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 512


@dataclass(frozen=True)
class Merged:
    """New contents of tokens: k, v fp32 `[H, n, D]`, weight fp32 `[H, n]`; changed: bool `[H, n]`, those that took
    others in.
    """

    k: Tensor
    v: Tensor
    weight: Tensor
    changed: Tensor


def merge(k: Tensor, v: Tensor, weight: Tensor, reference: Tensor, keep: Tensor, victim: Tensor) -> Merged:
    """Merge every victim into the kept token whose key resembles its own most (cosine).

    k, v: fp32 `[H, n, D]`; weight: fp32 `[H, n]`; reference: fp32 `[H, D]`, a query a head; keep, victim: bool
    `[H, n]`, disjoint. A head that keeps nothing to merge into merges nothing.
    """
    into = _nearest(k, keep, victim)  # [H, n]
    joins = (victim & keep.any(-1, keepdim=True)) | keep
    logit = torch.einsum("hd,hnd->hn", reference, k) * k.shape[-1] ** -0.5 + weight
    logit = logit.masked_fill(~joins, -torch.inf)
    most = torch.full_like(logit, -torch.inf).scatter_reduce_(1, into, logit, "amax")
    e = (logit - most.gather(1, into)).exp().nan_to_num(0.0)
    total = torch.zeros_like(e).scatter_add_(1, into, e)
    part = (e / total.gather(1, into).clamp_min(torch.finfo(e.dtype).tiny))[..., None]
    where = into[..., None].expand_as(k)
    mean_k, mean_v = (torch.zeros_like(x).scatter_add_(1, where, x * part) for x in (k, v))
    plain = torch.einsum("hd,hnd->hn", reference, mean_k) * k.shape[-1] ** -0.5
    members = torch.zeros_like(e).scatter_add_(1, into, joins.float())
    return Merged(mean_k, mean_v, most + total.log() - plain, keep & (members > 1))


def _nearest(k: Tensor, keep: Tensor, victim: Tensor) -> Tensor:
    """For victims the kept token with the most similar key, for all others themselves: int64 `[H, n]`."""
    unit = F.normalize(k, dim=-1)
    count = k.shape[1]
    own = torch.arange(count, device=k.device).expand(keep.shape)
    near = own.clone()
    for start in range(0, count, _BLOCK):
        part = slice(start, min(count, start + _BLOCK))
        cosine = (unit[:, part] @ unit.transpose(1, 2)).masked_fill(~keep[:, None], -torch.inf)
        near[:, part] = cosine.argmax(-1)
    return torch.where(victim & keep.any(-1, keepdim=True), near, own)


def reference_query(q: Tensor, num_kv_heads: int) -> Tensor:
    """The mean of a window of queries over its rows and each group's heads: fp32 `[H, D]` of q `[W, H*G, D]`."""
    return q.unflatten(1, (num_kv_heads, -1)).mean((0, 2))


def log_sum_exp(q: Tensor, k: Tensor, weight: Tensor, known: Tensor) -> Tensor:
    """log of the softmax sum of queries q fp32 `[H, m, D]` over keys `[H, n, D]`: fp32 `[H, m]`; a measure of what
    condensation has lost.
    """
    logit = q @ k.transpose(1, 2) * k.shape[-1] ** -0.5 + weight[:, None]
    return logit.masked_fill(~known[:, None], -torch.inf).logsumexp(-1)
