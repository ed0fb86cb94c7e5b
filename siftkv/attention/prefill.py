"""Prompt attention: exact, causal, over ragged prompts laid end to end; each layer is sifted as soon as its attention
is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.cache import KVCache
from siftkv.errors import NumericsError, OutOfPages


class Sifter(Protocol):
    """What prompt attention asks about a request: which query rows to measure, and where each token goes."""

    def rows(self, length: int) -> tuple[Tensor, Tensor] | None: ...

    def classify(self, layer: int, score: Tensor, protected: Tensor, v: Tensor) -> Tensor: ...


@dataclass
class PromptChunk:
    """One request's prompt within a flat batch: rows `[start, start + length)`.

    failure: why its keys and values could not be kept. The forward pass goes on for the others; this one must be
        released.
    rows, protected: what is the same in every layer, set by `PrefillAttention`.
    """

    slot: int
    start: int
    length: int
    sifter: Sifter
    failure: OutOfPages | NumericsError | None = None
    rows: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    protected: Tensor = field(init=False)


class PrefillAttention:
    """The `attend` callback of a prompt pass: `attention(layer, q [T, Hq, D], k, v [T, H, D]) -> [T, Hq, D]`.

    At most one layer's keys and values exist at 16 bits at a time: those that were just computed.
    """

    def __init__(self, cache: KVCache, chunks: list[PromptChunk]) -> None:
        self.cache = cache
        self.chunks = chunks
        device = cache.state.pages.device
        for chunk in chunks:
            rows = chunk.sifter.rows(chunk.length)
            chunk.rows = None if rows is None else (rows[0].to(device), rows[1].to(device))
            chunk.protected = cache.protected(chunk.slot, chunk.length)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # One look at the whole batch; only where it finds a fault is each request looked at for its own.
        finite = not self.cache.kernels.DEFERS_FAULTS and sums_are_finite(k, v)
        outputs = []
        for chunk in self.chunks:
            part = slice(chunk.start, chunk.start + chunk.length)
            out, lse = causal_attention(q[part], k[part], v[part])
            outputs.append(out)
            if chunk.failure is None:
                try:
                    self._keep(layer, chunk, q[part], k[part], v[part], lse, finite)
                except (OutOfPages, NumericsError) as failure:
                    chunk.failure = failure
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _keep(
        self, layer: int, chunk: PromptChunk, q: Tensor, k: Tensor, v: Tensor, lse: Tensor | None, finite: bool
    ) -> None:
        if chunk.rows is None:
            score = torch.zeros(k.shape[1], chunk.length, device=k.device)
        else:
            rows, weight = chunk.rows
            score = self.cache.kernels.prompt_importance(q, k, rows, weight, lse)
        tier = chunk.sifter.classify(layer, score, chunk.protected, v)
        self.cache.store_prompt(layer, chunk.slot, k, v, score, tier, finite)


def sums_are_finite(k: Tensor, v: Tensor) -> bool:
    """Whether fp32 sums over all keys and values are finite. Then every element is; the reverse may fail for extreme
    numbers.
    """
    return bool(torch.isfinite(k.sum(dtype=torch.float32) + v.sum(dtype=torch.float32)))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Exact causal attention of one prompt, through a library kernel: q `[N, Hq, D]`, k, v `[N, H, D]` to `[N, Hq, D]`.

    The second result is each query's natural log-sum-exp, fp32 `[Hq, N]`, where the library gives it: on a CPU and
    through cuDNN.
    """
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    if _cudnn_gives_lse(q):
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.0, True)
        return found[0][0].transpose(0, 1), found[1].view(q.shape[1], len(q))
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
