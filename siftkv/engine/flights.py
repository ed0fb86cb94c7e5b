"""Greedy decode steps on a GPU, launched one ahead: while one is computed, the host takes in what the one before it
gave.
"""

from __future__ import annotations

import torch

from siftkv.cache import KVCache
from siftkv.engine.faults import Faults
from siftkv.engine.outputs import StreamChunk
from siftkv.engine.pipeline import Flight, flies, most_pages, moved_pages
from siftkv.engine.runner import Runner
from siftkv.engine.scheduler import Scheduler
from siftkv.engine.sequence import Sequence
from siftkv.errors import NumericsError
from siftkv.kernels.reference.pages import most_taken


class Flights:
    """At most one step is under way between two calls. Triggers of its requests have run when it is launched."""

    def __init__(self, cache: KVCache, runner: Runner, scheduler: Scheduler, faults: Faults) -> None:
        self.cache = cache
        self.runner = runner
        self.scheduler = scheduler
        self.faults = faults
        self.under_way: Flight | None = None
        self.free_pages = 0
        """After the step before the one under way."""
        self._pages_ahead: int | None = None  # that this one and the next can take, where that was asked

    def may_start(self, sequences: list[Sequence]) -> bool:
        """Whether the next step of these can be launched without waiting for what it gives."""
        return self.runner.graphs is not None and all(flies(s) for s in sequences)

    def start(self, sequences: list[Sequence]) -> list[StreamChunk]:
        """Launch a step when none is under way. What it adds comes from `land`."""
        try:
            self.free_pages = self.cache.free_pages
            slots = self.cache.state.seen.new_tensor([s.slot for s in sequences])
            self._pages_ahead = int(most_taken(self.cache.state, slots, 2))
            self.under_way = self.launch(sequences, None)
        except Exception as error:
            return self.faults.of_step(error)
        return []

    def land(self) -> list[StreamChunk]:
        """Launch the next step if nothing stands against it, then take in what the one under way brought."""
        flight, self.under_way = self.under_way, None
        assert flight is not None
        live = [s for s in flight.sequences if s.finish_reason is None]
        chunks, fault = self._go_on(flight, [s for s in live if len(s.output_ids) + 1 < s.max_tokens])
        try:
            tokens, finite, self.free_pages, self._pages_ahead = flight.landing.wait()
        except Exception as error:
            self.under_way = None
            return chunks + self.faults.of_step(error)
        self.faults.foresee([s for s in live if len(s.output_ids) + 1 >= s.max_tokens])
        for sequence, token, ok in zip(flight.sequences, tokens, finite, strict=True):
            if sequence.finish_reason is None:  # else it ended by itself or was aborted while this step was on its way
                sequence.fed += 1
                wrong = NumericsError("NaN or infinity in the cache or the logits of a generated token")
                chunks += self.faults.append(sequence, token, None) if ok else [self.faults.fail(sequence, wrong)]
        return chunks if fault is None else chunks + self.faults.of_step(fault)

    def _go_on(self, flight: Flight, sequences: list[Sequence]) -> tuple[list[StreamChunk], Exception | None]:
        """Launch the step after `flight`, of sequences that do not end with it, if pages last for sure and nobody waits
        for a turn. Returns what triggers added, and the error if there was one.
        """
        chunks: list[StreamChunk] = []
        try:
            if not sequences or not self._has_room(sequences) or self.scheduler.wants_turn(self.free_pages):
                return chunks, None
            self.scheduler.gathering.stepped()
            sequences, chunks = self.faults.run_triggers(sequences, ahead=1)
            self.under_way = self.launch(sequences, flight) if sequences else None
        except Exception as error:
            return chunks, error
        return chunks, None

    def _has_room(self, sequences: list[Sequence]) -> bool:
        """Whether pages last for the step under way and the next, and triggers between them."""
        head_slots = self.cache.spec.head_slots
        needed = 2 * most_pages(sequences, head_slots)
        if self._pages_ahead is not None:
            needed = min(needed, self._pages_ahead)
        return needed + moved_pages(sequences, head_slots, ahead=1) <= self.free_pages

    def launch(self, sequences: list[Sequence], before: Flight | None) -> Flight:
        """Launch a step of `sequences`; their tokens come from `before`, where they are still on the way, or from the
        host. Where free pages run short, the device is asked how many of them the steps after it can take.
        """
        graphs = self.runner.graphs
        assert graphs is not None
        slots = torch.tensor([s.slot for s in sequences]).pin_memory()
        if before is None:
            tokens = torch.tensor([s.output_ids[s.fed] for s in sequences]).pin_memory()
        else:
            places = {id(s): row for row, s in enumerate(before.sequences)}
            rows = torch.tensor([places[id(s)] for s in sequences]).pin_memory()
            tokens = before.landing.tokens[rows.to(before.landing.tokens.device, non_blocking=True)]
        short = self.free_pages < 4 * most_pages(sequences, self.cache.spec.head_slots)
        with torch.inference_mode():
            return Flight(sequences, graphs.launch(tokens, slots, short))
