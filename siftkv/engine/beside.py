"""Hard-KV's selections beside decode steps: started at one step of a request, applied at its next.

A selection takes longer than a decode step can wait for, so it runs on a stream of its own. It starts behind the last
decode step that was launched, while the next one runs, and what it found is applied before the one after that, always:
the lag is a step, whatever was ready earlier, so that a request's tokens depend on nothing but itself.

What both touch. A decode step writes the window, the ring of queries, lengths, table entries behind the request's last
page, and tokens behind its last one, of which a selection sees copies from before the step (`SELECTION_TENSORS`), or
nothing. A selection writes votes and scores of the tokens that were there before the step; the step reads neither, as
no tier of a Hard-KV request is full or has a threshold. Scores of stored tokens are refreshed by a step only under
`accumulated`, which reads them: its selections run on the decode stream, between two steps, with the same lag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from siftkv.cache import KVCache
from siftkv.engine.triggers import Trigger
from siftkv.kernels.state import SELECTION_TENSORS, CacheState, Selection, SelectionRule


class Job(Protocol):
    """A selection that was started."""

    def join(self) -> Selection:
        """What it found; work on the current stream from here on runs after it. The host waits for nothing. May be
        called again.
        """


class Lane(Protocol):
    """Where selections run, in the order in which they were started."""

    def start(self, work: Callable[[], Selection], reads: Iterable[Tensor]) -> Job:
        """Run `work` behind what the current stream has been given so far. reads: tensors that nobody else holds. Where
        `work` raises, the current stream goes on behind what it had launched by then.
        """


@dataclass(frozen=True)
class _Done:
    found: Selection

    def join(self) -> Selection:
        return self.found


class CurrentStream:
    """Selections on the stream of the decode steps, or on a CPU."""

    def start(self, work: Callable[[], Selection], reads: Iterable[Tensor]) -> Job:
        return _Done(work())


@dataclass(frozen=True)
class _Running:
    found: Selection
    selected: torch.cuda.Event

    def join(self) -> Selection:
        current = torch.cuda.current_stream()
        current.wait_event(self.selected)
        for tensor in vars(self.found).values():
            tensor.record_stream(current)
        return self.found


class SideStream:
    """Selections on a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, work: Callable[[], Selection], reads: Iterable[Tensor]) -> Job:
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                found = work()
                selected = torch.cuda.Event()
                selected.record()
        except BaseException:  # the request's pages, and what was read, will be somebody else's
            torch.cuda.current_stream().wait_stream(self._stream)
            raise
        for tensor in reads:
            tensor.record_stream(self._stream)
        return _Running(found, selected)


def lane_of(cache: KVCache) -> Lane:
    """The cache's own."""
    lane: Lane | None = cache.state.scratch.get("selections")
    if lane is None:
        device = cache.state.pages.device
        lane = cache.state.scratch["selections"] = SideStream(device) if device.type == "cuda" else CurrentStream()
    return lane


@dataclass(frozen=True)
class Pending:
    """A trigger between its selection and what is made of it.

    position: tokens that the request had seen; near: those of them that stay in any case. tokens_at: int32 `[L, H, T]`,
    tokens a tier at that time.
    """

    position: int
    near: int
    rewrites: bool
    rule: SelectionRule
    tokens_at: Tensor
    job: Job


def begin(
    cache: KVCache,
    slot: int,
    seen: int,
    near: int,
    rewrites: bool,
    rule: SelectionRule,
    select: Callable[[CacheState], Selection],
) -> Pending:
    """Start the selection of the request in `slot`, for all layers and heads. The host waits for nothing.

    select: makes it of a cache that knows the request alone, in slot 0.

    Until it is applied, nothing but decode steps may change the request; `KVCache.release` and `swap_out` wait for it.
    """
    kernels: Any = cache.kernels
    before = kernels.snapshot(cache.state, slot)
    lane = CurrentStream() if rule.metric == "accumulated" else lane_of(cache)
    reads = [getattr(before, name) for name in SELECTION_TENSORS]
    job = lane.start(lambda: select(before), reads)
    cache.under_way[slot] = job.join
    return Pending(seen, near, rewrites, rule, before.lengths[0], job)


@torch.inference_mode()
def apply(cache: KVCache, slot: int, pending: Pending) -> Trigger:
    """Rewrite what the selection lets stay, and tokens that came since. A rewrite that finds no free page is left to
    the next trigger. The host waits for nothing.
    """
    kernels: Any = cache.kernels
    found, rule = pending.job.join(), pending.rule
    cache.under_way.pop(slot, None)
    done: bool | Tensor = True
    if pending.rewrites:
        done = kernels.rewrite(cache.state, slot, found.keep, rule.sources[0], rule.sources, pending.tokens_at)
    held = held_tokens(cache, slot)
    return Trigger(pending.position, pending.rewrites, done, found.kept + pending.near, held, found.mass)


def held_tokens(cache: KVCache, slot: int) -> Tensor:
    """Tokens that each head has, window and sinks included: int64 `[L, H]`."""
    state = cache.state
    seen = state.seen[slot]
    near = state.sinks[slot].minimum(seen) + (seen - state.window_start[slot]).clamp_min(0)
    return state.lengths[slot].long().sum(-1) + near
