"""CUDA graphs of the decode step: one a batch bucket, captured once and replayed while lengths, tiers and page tables
change under it (and another where stale tokens are examined).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siftkv.attention import DecodeAttention
from siftkv.cache import KVCache
from siftkv.kernels.cuda import products
from siftkv.kernels.cuda.step import choose
from siftkv.kernels.reference.pages import most_taken
from siftkv.models import Decoder

_WARM_UP_STEPS = 2


def batch_buckets(most: int) -> list[int]:
    """Batch sizes that are captured: 1, 2, 4, then multiples of 8, and the largest itself."""
    sizes = {b for b in (1, 2, 4, *range(8, most + 1, 8)) if b <= most}
    return sorted(sizes | {most})


@dataclass(frozen=True)
class _Step:
    """Outputs of a captured step: logits `[B, vocab]` in the model's dtype, and what
    `siftkv.kernels.cuda.step.choose` makes of them.
    """

    logits: Tensor
    choice: Tensor


@dataclass(frozen=True)
class Landing:
    """A step on its way: its tokens on the device, valid until the next step is launched, and a copy of its `choice`
    that has arrived in host memory when `wait` returns.
    """

    tokens: Tensor
    _choice: Tensor
    _ahead: Tensor | None
    _arrived: torch.cuda.Event

    @classmethod
    def of(cls, choice: Tensor, count: int, ahead: Tensor | None) -> Landing:
        """Of the first `count` requests of a step. ahead: what two more steps can take."""
        tokens, choice_there, ahead_there = choice[:count], _to_host(choice), None if ahead is None else _to_host(ahead)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(tokens, choice_there, ahead_there, arrived)

    def wait(self) -> tuple[list[int], list[bool], int, int | None]:
        """Token ids and finite flags of the step's requests, the pages that were free after it, and those that two more
        steps can take, if that was asked.
        """
        self._arrived.synchronize()
        choice, count = self._choice.tolist(), len(self.tokens)
        size = (len(choice) - 2) // 2
        finite = [bool(x) for x in choice[size : size + count]]
        return choice[:count], finite, choice[-1] - choice[-2], None if self._ahead is None else int(self._ahead)


def _to_host(x: Tensor) -> Tensor:
    """A copy in pinned memory, on its way."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


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
        self._padding = cache.state.padding_slot
        cache.state.seen[self._padding] = 1
        self._token_ids = torch.zeros(self.buckets[-1], dtype=torch.int64, device=device)
        self._slots = torch.full_like(self._token_ids, self._padding)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, _Step]] = {}
        self._pool: Any = None
        self._stream = torch.cuda.Stream(device)
        layers = zip(*(layer.linears() for layer in decoder.layers), strict=True)
        products.prepare(layers, (decoder.head, None), self.buckets, self._stream)
        self._space = cache.state.scratch["products"] = products.space_for_graphs(device)

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every bucket, the largest first, so that the others fit into its memory. Graphs that examine stale
        tokens too are captured when they are first needed, unless they are needed now.
        """
        for size in reversed(self.buckets):
            self._capture(size)

    def run(self, token_ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Feed one token to each request: int64 `[B]` each, on the host (pinned) or the device.

        Returns logits fp32 `[B, vocab]` and finite bool `[B]`, valid until the next run.
        """
        step = self._replay(token_ids, slots)
        return step.logits[: len(slots)].float(), self.cache.finite(self._slots[: len(slots)])

    def launch(self, token_ids: Tensor, slots: Tensor, looks_ahead: bool = False) -> Landing:
        """`run` for greedy requests, without waiting: the likeliest tokens stay on the device and go to the host.

        looks_ahead: let the landing tell how many pages two more steps can take.
        """
        step, count = self._replay(token_ids, slots), len(slots)
        ahead = most_taken(self.cache.state, self._slots[:count], 2) if looks_ahead else None
        return Landing.of(step.choice, count, ahead)

    def _replay(self, token_ids: Tensor, slots: Tensor) -> _Step:
        count = len(slots)
        size = next(b for b in self.buckets if b >= count)
        if (size, self.cache.examines) not in self._graphs:
            self._capture(size)
        self._token_ids[:count].copy_(token_ids, non_blocking=True)
        self._slots[:count].copy_(slots, non_blocking=True)
        if count < size:
            self._slots[count:size].fill_(self._padding)
        graph, step = self._graphs[size, self.cache.examines]
        graph.replay()
        return step

    def _capture(self, size: int) -> None:
        kept = self._slots.clone()
        self._slots.fill_(self._padding)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), products.lend(self._space):
            for _ in range(_WARM_UP_STEPS):
                self._step(size)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream), products.lend(self._space):
            step = self._step(size)
        self._pool = self._pool or graph.pool()
        self._graphs[size, self.cache.examines] = (graph, step)
        self._slots.copy_(kept)

    def _step(self, size: int) -> _Step:
        token_ids, slots, state = self._token_ids[:size], self._slots[:size], self.cache.state
        logits = decode_step(self.decoder, self.cache, token_ids, slots)
        return _Step(logits, choose(logits, state.not_finite, slots, state.counters))


def decode_step(decoder: Decoder, cache: KVCache, token_ids: Tensor, slots: Tensor) -> Tensor:
    """One token of each request, int64 `[B]` each, eagerly: logits `[B, vocab]` in the model's dtype. Then
    `KVCache.finite` tells whether they are of use.
    """
    positions = cache.state.seen[slots]
    hidden = decoder(token_ids, positions, DecodeAttention(cache, slots))
    cache.step(slots)
    return decoder.raw_logits(hidden)
