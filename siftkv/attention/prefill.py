"""Prompt attention: exact, causal, over ragged prompts laid end to end; each layer is sifted as soon as its attention
is done.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.attention.groups import Group, PromptChunk, groups_of
from siftkv.cache import KVCache
from siftkv.errors import NumericsError, OutOfPages
from siftkv.kernels.prompts import PromptBatch
from siftkv.kernels.ranking import WorthRule
from siftkv.policies.base import PromptView, RankedPrompts


class PrefillAttention:
    """The `attend` callback of a prompt pass: `attention(layer, q [T, Hq, D], k, v [T, H, D]) -> [T, Hq, D]`.

    At most one layer's keys and values exist at 16 bits at a time: those that were just computed. Where kernels defer
    faults, all prompts of a layer are measured and stored at once and nothing is read by the host; else prompts are
    taken one by one, so that each may fail for itself.
    """

    def __init__(self, cache: KVCache, chunks: list[PromptChunk]) -> None:
        self.cache = cache
        self.chunks = chunks
        self.batch = PromptBatch.of(
            [c.slot for c in chunks],
            [c.length for c in chunks],
            [cache.middle(c.slot, c.length) for c in chunks],
            [c.sifter.rows(c.length) for c in chunks],
            cache.state.pages.device,
        )
        self._groups = groups_of(cache, chunks, self.batch.table[:, 0].long())
        self._ring = cache.ring_places([(c.slot, c.start, c.length) for c in chunks])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernels = self.cache.kernels
        if self.cache.spec.query_rows:
            self.cache.store_queries(layer, self._ring, q)
        if kernels.DEFERS_FAULTS:
            out, lse = ragged_attention(q, k, v, self.batch)
            score = kernels.measure_prompts(self.batch, q, k, lse)
            tier = torch.empty(score.shape, dtype=torch.int8, device=score.device)
            for group in self._groups:
                if group.rule is None:
                    self._classify(layer, group, q, k, v, score, lse, tier)
                else:
                    self._rank(layer, group, group.rule, q, k, v, score, lse, tier)
            kernels.store_prompts(self.cache.state, layer, self.batch, k, v, score, tier)
            return out
        # One look at the whole batch; only where it finds a fault is each request looked at for its own.
        finite = sums_are_finite(k, v)
        outputs = []
        for group in self._groups:
            out, lse = causal_attention(q[group.span], k[group.span], v[group.span])
            outputs.append(out)
            self._keep_one(layer, group, q, k, v, lse, finite)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _keep_one(
        self, layer: int, group: Group, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None, finite: bool
    ) -> None:
        prompt, span = group.prompts[0], group.span
        chunk = self.chunks[prompt]
        if chunk.failure is not None:
            return
        rows, weight = self.batch.measured(prompt)
        score = torch.zeros(k.shape[1], chunk.length, device=k.device)
        if len(rows):
            score = self.cache.kernels.prompt_importance(q[span], k[span], rows, weight, lse)
        try:
            tier = torch.empty(score.shape, dtype=torch.int8, device=k.device)
            own = replace(group, span=slice(0, chunk.length))
            self._classify(layer, own, q[span], k[span], v[span], score, lse, tier)
            self.cache.store_prompt(layer, chunk.slot, k[span], v[span], score, tier, finite)
        except (OutOfPages, NumericsError) as failure:
            chunk.failure = failure

    def _classify(
        self,
        layer: int,
        group: Group,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score: Tensor,
        lse: Tensor | None,
        tier: Tensor,
    ) -> None:
        """Ask the group's policy and write its answer into `tier` int8 `[H, T]`, and `score` fp32 where it says so."""
        span, shape, padding = group.span, group.shape, group.padding

        def measure(rows: Tensor, weight: Tensor) -> Tensor:
            rows, weight = rows.to(k.device), weight.to(k.device)
            each = []
            for at in range(span.start, span.stop, shape[1]):
                own = slice(at, at + shape[1])
                sums = None if lse is None else lse[:, own]
                each.append(self.cache.kernels.prompt_importance(q[own], k[own], rows, weight, sums))
            return torch.stack(each)

        def seen(x: Tensor) -> Tensor:
            own = x[span] if padding is None else x[span][padding.rows]
            return own.unflatten(0, shape)

        view = PromptView(
            layer,
            seen(score.t()).transpose(1, 2),
            group.protected,
            seen(q),
            seen(k),
            seen(v),
            measure if padding is None else None,
            (self.cache.state.conditioning.cos, self.cache.state.conditioning.sin),
            self.cache.spec.num_layers,
            group.places,
            None if padding is None else padding.lengths,
        )
        found = group.sifter.sift(view)
        for whole, part in ((tier, found.tier), (score, found.score)):
            if part is not None:
                flat = part.transpose(0, 1).flatten(1)
                whole[:, span] = flat if padding is None else flat[:, padding.places]
        if found.share is not None:
            self.cache.set_shares(layer, group.slots, found.share)

    def _rank(
        self,
        layer: int,
        group: Group,
        rule: WorthRule,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score: Tensor,
        lse: Tensor | None,
        tier: Tensor,
    ) -> None:
        """As `_classify`, where kernels rank the group's tokens; they write `score` themselves."""
        # `rank_prompts` is not an operation of all bodies: only those that defer faults take prompts of many lengths.
        prompts, kernels = group.prompts, cast(Any, self.cache.kernels)
        rank = partial(kernels.rank_prompts, self.batch, prompts, rule, q=q, k=k, v=v, lse=lse, score=score)
        lengths = self.batch.lengths[prompts.start : prompts.stop]
        view = RankedPrompts(layer, self.cache.spec.num_layers, lengths, k.shape[1], rank)
        found = group.sifter.sift_ranked(view)
        tier[:, group.span].copy_(found.tier)
        if found.share is not None:
            self.cache.set_shares(layer, group.slots, found.share)


def sums_are_finite(k: Tensor, v: Tensor) -> bool:
    """Whether fp32 sums over all keys and values are finite. Then every element is; the reverse may fail for extreme
    numbers.
    """
    return bool(torch.isfinite(k.sum(dtype=torch.float32) + v.sum(dtype=torch.float32)))


def ragged_attention(q: Tensor, k: Tensor, v: Tensor, batch: PromptBatch) -> tuple[Tensor, Tensor | None]:
    """Exact causal attention of prompts laid end to end: q `[T, Hq, D]`, k, v `[T, H, D]` to `[T, Hq, D]`, and each
    query's natural log-sum-exp, fp32 `[Hq, T]`, where the library gives it.

    Prompts of one length are a batch to cuDNN; several short ones go through one call of PyTorch's variable-length
    flash attention; a long one is faster alone, through cuDNN.
    """
    if len(set(batch.lengths)) == 1 and len(batch.slots) > 1 and _cudnn_gives_lse(q):
        return _equal_attention(q, k, v, batch)
    if len(batch.slots) > 1 and batch.longest <= _SHORT_PROMPT and _flash_takes(q):
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, batch.bounds, batch.bounds, batch.longest, batch.longest, 0.0, True, False
        )
        return out, lse.view(q.shape[1], len(q))
    parts = [causal_attention(q[own], k[own], v[own]) for own in map(batch.span, range(len(batch.slots)))]
    if len(parts) == 1:
        return parts[0]
    sums = [lse for _, lse in parts if lse is not None]
    return torch.cat([out for out, _ in parts]), torch.cat(sums, 1) if len(sums) == len(parts) else None


def _equal_attention(q: Tensor, k: Tensor, v: Tensor, batch: PromptBatch) -> tuple[Tensor, Tensor]:
    """cuDNN takes prompts of one length as a batch."""
    out, lse = _cudnn_attention(*(x.unflatten(0, (len(batch.slots), batch.longest)) for x in (q, k, v)))
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


_PLANS_AN_OCTAVE, _FINEST, _MOST_ROWS = 16, 64, 16384


def planned_length(tokens: int, prompts: int = 1) -> int:
    """The length to which prompts are padded for cuDNN, which takes 45 to 70 ms to plan for one that it has not seen:
    one of 16 an octave. Beyond 16,384 rows copies and what is computed in vain take as long.
    """
    step = max(_FINEST, (1 << (tokens - 1).bit_length()) // (2 * _PLANS_AN_OCTAVE))
    length = -(-tokens // step) * step
    return length if prompts * length <= _MOST_ROWS else tokens


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts of one length: q `[B, n, Hq, D]`, k, v `[B, n, H, D]` to `[B, n, Hq, D]` and log-sum-exps `[B, Hq, n]`.

    Zeros behind a prompt are masked for all its queries, and change no bit.
    """
    prompts, tokens, heads, _ = q.shape
    more = planned_length(tokens, prompts) - tokens
    padded = (F.pad(x, (0, 0, 0, 0, 0, more)) if more else x for x in (q, k, v))
    out, lse = _planned(*(x.transpose(1, 2) for x in padded))
    return out.transpose(1, 2)[:, :tokens], lse.view(prompts, heads, -1)[..., :tokens]


def _planned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The library's own operation, heads before tokens."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    return out, lse


_SHORT_PROMPT = 2048
"""Tokens up to which prompts share one call of variable-length attention."""


def _flash_takes(q: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Exact causal attention of one prompt, through a library kernel: q `[N, Hq, D]`, k, v `[N, H, D]` to `[N, Hq, D]`.

    The second result is each query's natural log-sum-exp, fp32 `[Hq, N]`, where the library gives it: on a CPU and
    through cuDNN.
    """
    if _cudnn_gives_lse(q):
        out, lse = _cudnn_attention(q[None], k[None], v[None])
        return out[0], lse[0]
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    if _cpu_gives_lse(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        return out[0].transpose(0, 1), lse[0]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1), None


def _cpu_gives_lse(q: Tensor) -> bool:
    """PyTorch's fused attention for CPUs, which takes grouped queries; the operation is not public, so it may go."""
    fused = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    return fused and q.device.type == "cpu" and len(q) > 0


def _cudnn_gives_lse(q: Tensor) -> bool:
    """cuDNN's fused attention with grouped queries: 16-bit types, Hopper and later, head_dim up to 128."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] > 128:
        return False
    return torch.cuda.get_device_capability(q.device)[0] >= 9 and torch.backends.cudnn.is_available()
