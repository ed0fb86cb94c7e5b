"""CUDA graphs of the decode step: one a batch bucket, captured once and replayed while lengths, tiers and page tables
change under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siftkv.attention import DecodeAttention
from siftkv.cache import KVCache
from siftkv.models import Decoder

_WARM_UP_STEPS = 2


def batch_buckets(most: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, then multiples of 8, and the largest itself."""
    sizes = {b for b in (1, 2, 4, *range(8, most + 1, 8)) if b <= most}
    return sorted(sizes | {most})


@dataclass(frozen=True)
class _Step:
    """Outputs of a captured step: logits fp32 `[B, vocab]`, best int64 `[B]`; finite (keys and values) and usable
    (logits) bool `[B]`.
    """

    logits: Tensor
    finite: Tensor
    best: Tensor
    usable: Tensor


@dataclass(frozen=True)
class Landing:
    """A step on its way: its tokens on the device, and copies that arrive in host memory when `wait` returns."""

    tokens: Tensor
    _host: tuple[Tensor, Tensor, Tensor]
    _arrived: torch.cuda.Event

    @classmethod
    def of(cls, tokens: Tensor, finite: Tensor, counters: Tensor) -> Landing:
        tokens = tokens.clone()
        host = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in (tokens, finite, counters))
        for target, source in zip(host, (tokens, finite, counters), strict=True):
            target.copy_(source, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(tokens, host, arrived)  # type: ignore[arg-type]

    def wait(self) -> tuple[list[int], list[bool], int]:
        """Token ids and finite flags of the step's requests, and the pages that were free after it."""
        self._arrived.synchronize()
        tokens, finite, counters = self._host
        return tokens.tolist(), finite.tolist(), int(counters[1] - counters[0])


class DecodeGraphs:
    """The decode step of up to `cache.spec.max_slots` requests as CUDA graphs.

    A batch that is smaller than its bucket is filled up with the cache's padding slot, which keeps nothing. Everything
    that changes between steps (token ids, slots, lengths, page tables, thresholds) is read from device memory inside
    the graph.
    """

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.decoder = decoder
        self.cache = cache
        self.buckets = batch_buckets(cache.spec.max_slots)
        device = decoder.device
        self._padding = cache.spec.max_slots
        self._token_ids = torch.zeros(self.buckets[-1], dtype=torch.int64, device=device)
        self._slots = torch.full_like(self._token_ids, self._padding)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, _Step]] = {}
        self._pool: Any = None

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every bucket, the largest first, so that the others fit into its memory."""
        for size in reversed(self.buckets):
            self._capture(size)

    def run(self, token_ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Feed one token to each request: int64 `[B]` each, on the host (pinned) or the device.

        Returns logits fp32 `[B, vocab]` and finite bool `[B]`, valid until the next run.
        """
        step = self._replay(token_ids, slots)
        return step.logits[: len(slots)], step.finite[: len(slots)]

    def launch(self, token_ids: Tensor, slots: Tensor) -> Landing:
        """`run` for greedy requests, without waiting: the likeliest tokens stay on the device and go to the host."""
        step = self._replay(token_ids, slots)
        count = len(slots)
        return Landing.of(step.best[:count], step.finite[:count] & step.usable[:count], self.cache.state.counters)

    def _replay(self, token_ids: Tensor, slots: Tensor) -> _Step:
        count = len(slots)
        size = next(b for b in self.buckets if b >= count)
        if size not in self._graphs:
            self._capture(size)
        self._token_ids[:count].copy_(token_ids, non_blocking=True)
        self._slots[:count].copy_(slots, non_blocking=True)
        self._slots[count:size].fill_(self._padding)
        graph, step = self._graphs[size]
        graph.replay()
        return step

    def _capture(self, size: int) -> None:
        kept = self._slots.clone()
        self._slots.fill_(self._padding)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                self._step(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step = self._step(size)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = (graph, step)
        self._slots.copy_(kept)

    def _step(self, size: int) -> _Step:
        state = self.cache.state
        state.seen[self._padding].fill_(1)
        state.window_start[self._padding].fill_(0)
        token_ids, slots = self._token_ids[:size], self._slots[:size]
        logits, finite = decode_step(self.decoder, self.cache, token_ids, slots)
        best = logits.max(-1)
        return _Step(logits, finite, best.indices, best.values.isfinite())


def decode_step(decoder: Decoder, cache: KVCache, token_ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each request, int64 `[B]` each, eagerly: logits fp32 `[B, vocab]` and finite bool `[B]`."""
    positions = cache.state.seen[slots]
    hidden = decoder(token_ids, positions, DecodeAttention(cache, slots))
    finite = cache.finite(slots)
    cache.step(slots)
    return decoder.logits(hidden), finite
