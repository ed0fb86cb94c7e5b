"""The engine thread's record of who waits for what: gives each step's chunks to their generations, and counts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from siftkv.engine.llm import LLM
from siftkv.engine.outputs import StreamChunk
from siftkv.engine.sequence import Sequence
from siftkv.errors import SiftKVError
from siftkv.server.courier import Couriers, Load, Parcel
from siftkv.server.generation import Generation
from siftkv.server.metrics import ServerMetrics

_LEARNING_RATE = 0.1
_LONGEST_WAIT = 60


@dataclass
class _Entry:
    """A request: its generation, its place there, its open completions, and when each had its last token."""

    generation: Generation
    place: int
    open: int
    last: dict[int, float] = field(default_factory=dict)


class Ledger:
    """Requests that the engine has taken and that have not ended. Only the engine's thread uses it.

    Methods that end completions return how many.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._entries: dict[str, _Entry] = {}
        self._couriers = Couriers()
        self._request_seconds = 1.0

    def enter(self, generation: Generation) -> None:
        """Take up a generation whose requests were added to the engine."""
        for place, (request_id, request) in enumerate(zip(generation.ids, generation.requests, strict=True)):
            self._entries[request_id] = _Entry(generation, place, request.params.n)
            self._metrics.arrived(request)

    def seconds_to_wait(self) -> int:
        """A guess at when a client that finds the queue full should try again: what a request takes these days."""
        return min(_LONGEST_WAIT, max(1, round(self._request_seconds)))

    def deliver(self, llm: LLM, chunks: list[StreamChunk]) -> int:
        """Hand a step's chunks over: one call into the event loop a step at most, however many requests there are."""
        load: Load = {}
        try:
            return self._sort(llm, chunks, load)
        finally:  # what has been sorted must arrive even if the engine fails over the rest
            self._couriers.send(load)

    def _sort(self, llm: LLM, chunks: list[StreamChunk], load: Load) -> int:
        """Put chunks where they belong, and close what has ended. Returns the completions that have."""
        now, ended = time.perf_counter(), 0
        gaps: list[float] = []
        for chunk in chunks:
            entry = self._entries.get(chunk.request_id)
            if entry is None:
                continue  # it was cancelled
            sequence = llm.engine.sequences(chunk.request_id)[chunk.index]
            if chunk.token_ids:
                self._measure(entry, chunk, sequence, now, gaps)
            if entry.generation.whole and chunk.finish_reason is None:
                continue
            parcel = load.setdefault(entry.generation, Parcel())
            if sequence.error is not None:
                parcel.error = parcel.error or sequence.error
            else:
                parcel.items.append((entry.place, chunk))
            if chunk.finish_reason is not None:
                ended += 1
                self._finished(sequence)
                self._close(llm, chunk.request_id, entry)
        self._metrics.further_tokens(gaps)
        failed = [generation for generation, parcel in load.items() if parcel.error is not None]
        return ended + sum(self.drop(llm, generation) for generation in failed)

    def drop(self, llm: LLM, generation: Generation) -> int:
        """End what is open of a generation, without a word to it; its pages return."""
        ended = 0
        for request_id in generation.ids:
            entry = self._entries.get(request_id)
            if entry is None:
                continue
            for chunk in llm.engine.abort(request_id):
                self._finished(llm.engine.sequences(request_id)[chunk.index])
            llm.engine.forget(request_id)
            del self._entries[request_id]
            ended += entry.open
        return ended

    def cancel(self, llm: LLM, generation: Generation) -> int:
        """`drop` for a client that went away."""
        ended = self.drop(llm, generation)
        if ended:
            self._metrics.cancelled()
        return ended

    def end_all(self, llm: LLM | None, error: SiftKVError) -> None:
        """Tell every generation that it ends with an error. llm: None when the engine cannot be used any more."""
        generations = {entry.generation for entry in self._entries.values()}
        for generation in generations:
            if llm is not None:
                self.drop(llm, generation)
        self._entries.clear()
        self._couriers.send({generation: Parcel(error=error) for generation in generations})

    def _close(self, llm: LLM, request_id: str, entry: _Entry) -> None:
        entry.open -= 1
        if entry.open == 0:
            del self._entries[request_id]
            llm.engine.forget(request_id)

    def _measure(self, entry: _Entry, chunk: StreamChunk, sequence: Sequence, now: float, gaps: list[float]) -> None:
        before = entry.last.get(chunk.index)
        entry.last[chunk.index] = now
        if before is None:
            self._metrics.first_token(now - sequence.arrival)
        else:
            gaps.append(now - before)

    def _finished(self, sequence: Sequence) -> None:
        times = sequence.metrics()
        self._metrics.finished(
            sequence.finish_reason or "abort",
            times.total_s,
            times.queue_s,
            len(sequence.prompt_ids),
            len(sequence.output_ids),
            sequence.policy.name,
        )
        self._metrics.preempted(sequence.preemptions)
        self._request_seconds += _LEARNING_RATE * (times.total_s - self._request_seconds)
