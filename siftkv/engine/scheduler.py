"""Who runs next: continuous batching with admission by pages that are really free, and preemption when they run out."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import torch

from siftkv.cache import KVCache
from siftkv.engine.concerned import concerning
from siftkv.engine.forecast import Forecast, peak
from siftkv.engine.gathering import Gathering
from siftkv.engine.pipeline import moved_pages
from siftkv.engine.sequence import Sequence, Status

Preemption = Literal["swap", "recompute"]
Admission = Literal["careful", "greedy"]

_log = logging.getLogger("siftkv.engine")
_LASTS = 16
"""Steps for which the pages that a step may take are taken to be what they were."""

_OVERCOMMIT = 1 / 20
"""Of the pool, while swap space lasts: the last of many equal requests then waits in host memory for the end of the
first, instead of for a wave of its own.
"""


@dataclass(frozen=True)
class Batch:
    """What the next pass computes: prompts, or one token of each running sequence. failed: sequences that can never
    fit.
    """

    prefill: list[Sequence] = field(default_factory=list)
    decode: list[Sequence] = field(default_factory=list)
    failed: list[Sequence] = field(default_factory=list)


class Scheduler:
    """First come, first served, within a priority. Prompts go first while pages are free, on a GPU several together
    (`Gathering`); the newest running sequence is preempted first.

    preemption: `swap` copies a victim's sifted pages to host memory and back (bit for bit), while `swap_bytes` last;
        `recompute`, and the fallback, prefills the prompt again and feeds the generated tokens through the decode
        policy.
    admission: `careful` starts a prompt, or brings a swapped request back, only if everything that runs is expected to
        fit until it ends, by the lengths of answers that ended and each request's `max_tokens`; `greedy` whenever it
        fits now. Where swapping is cheap the careful one lets prompts exceed the pool by a twentieth.
    """

    def __init__(
        self,
        cache: KVCache,
        max_batched_tokens: int,
        preemption: Preemption = "swap",
        swap_bytes: int = 4 << 30,
        admission: Admission = "careful",
    ) -> None:
        self.cache = cache
        self.max_batched_tokens = max_batched_tokens
        self.preemption = preemption
        self.swap_bytes = swap_bytes
        self.admission = admission
        self.waiting: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.forecast = Forecast(cache)
        self.gathering = Gathering(cache.kernels.DEFERS_FAULTS, max_batched_tokens)
        self._hold_prompts = False
        self._reserved = 0  # pages that the next step may take, when they were last counted
        self._asked = 0  # how often somebody relied on that number since

    @property
    def swapped_bytes(self) -> int:
        """Host bytes that preempted requests take now."""
        return sum(s.swapped.nbytes for s in self.swapped if s.swapped is not None)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.swapped or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue behind the last that waits with the same priority or a more urgent one."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].params.priority > sequence.params.priority:
            place -= 1
        self.waiting.insert(place, sequence)

    def schedule(self) -> Batch:
        """Choose the next pass. Sequences of a prefill batch have a slot and are running; they stay so unless `requeue`
        takes them back.
        """
        self._resume()
        prompts = self._admit() if self._lets_in() else []
        if prompts:
            self.gathering.started()
            return Batch(prefill=prompts)
        self._hold_prompts = False
        self.gathering.stepped()
        failed = self._make_room()
        return Batch(decode=list(self.running), failed=failed)

    def wants_turn(self, free_pages: int) -> bool:
        """Whether requests that wait could probably start now; `free_pages` as last heard of.

        What the next step may take was counted when steps began to overlap, since counting waits for the device. So
        every few steps the answer does without it, and if it is yes, `schedule` counts anew.
        """
        self._asked += 1
        if not self.cache.free_slots:
            return False
        free_pages -= self._reserved if self._asked <= _LASTS else 0
        if self.swapped:
            first = self.swapped[0]
            assert first.swapped is not None
            fits = first.swapped.num_pages + self.cache.spec.head_slots <= free_pages
            return fits and self._fits_until_it_ends(first, self.running)
        return bool(self.waiting) and self._can_start(self._wanted(), free_pages)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it stands, and give its pages back."""
        self.forecast.learn_output(sequence)
        for queue in (self.waiting, self.swapped, self.running):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.slot >= 0:
            self.cache.release([sequence.slot])
        self._reserved = 0
        sequence.slot, sequence.swapped, sequence.status = -1, None, Status.FINISHED

    def requeue(self, sequences: list[Sequence], admitted: int) -> list[Sequence]:
        """Take back prompts for which pages ran out during prefill, of a batch of `admitted`; their order is kept.

        Prompts wait until a decode step has run or something has ended. Returns those that can never fit: a prompt that
        had the whole pool to itself.
        """
        hopeless = []
        for sequence in reversed(sequences):
            self.running.remove(sequence)
            self._take_back(sequence)
            sequence.prefill_failures += 1
            if admitted == 1 and not self.running and not self.swapped:
                hopeless.append(self.waiting.popleft())
        self._hold_prompts = True
        return hopeless

    def _take_back(self, sequence: Sequence) -> None:
        """A prompt waits again, as the first."""
        if sequence.slot >= 0:
            self.cache.release([sequence.slot])
        sequence.slot, sequence.status = -1, Status.WAITING
        self.waiting.appendleft(sequence)

    def leans_on_itself(self) -> bool:
        """Whether the only request that runs has a trigger before its next step, whose pages nobody keeps free."""
        return len(self.running) == 1 and moved_pages(self.running, 1) > 0

    def has_room(self) -> bool:
        """Whether the next step finds its pages for sure, once triggers before it have run."""
        return self.cache.step_page_bound(self._slots(self.running)) <= self.cache.free_pages

    def _fits_until_it_ends(self, sequence: Sequence, others: list[Sequence], extra: int = 0) -> bool:
        """Whether the pool and `extra` pages are expected to hold a sequence beside others until they end."""
        if self.admission == "greedy" or not others:
            return True
        return self.forecast.peak_pages([sequence, *others]) <= self.cache.spec.num_pages + extra

    def _lets_in(self) -> bool:
        """Whether prompts may start, if they fit."""
        if self.swapped or not self.waiting or not self.cache.free_slots:
            return False
        if not self.running:
            return True
        wanted = 0 if self._hold_prompts else self._wanted()
        return wanted == 1 or (wanted > 1 and self._can_start(wanted, self.cache.free_pages - self._bound()))

    def _wanted(self) -> int:
        """How many prompts have to start together, if any is to."""
        return self.gathering.wanted(self.waiting, len(self.running))

    def _can_start(self, count: int, free_pages: int) -> bool:
        """Whether the first `count` that wait would find slots and pages beside what runs, as far as is known."""
        if count > self.cache.free_slots:
            return False
        first, *others = islice(self.waiting, count)
        needed = sum(map(self.forecast.start_pages, (first, *others))) + self.cache.spec.head_slots
        return needed <= free_pages and self._fits_until_it_ends(first, others + self.running, self._overcommit())

    def _overcommit(self) -> int:
        """Pages beyond the pool that prompts may be expected to need."""
        if self.preemption != "swap":
            return 0
        room = max(0, self.swap_bytes - self.swapped_bytes) // self.cache.spec.page_bytes
        return min(room, int(self.cache.spec.num_pages * _OVERCOMMIT))

    def _slots(self, sequences: list[Sequence]) -> torch.Tensor:
        return torch.tensor([s.slot for s in sequences], dtype=torch.int64, device=self.cache.state.pages.device)

    def _bound(self) -> int:
        """Pages that the next step can take at most. A request that is alone is not stopped by what its own trigger
        might take: it can only take it from itself.
        """
        if not self.running:
            return 0
        moved = moved_pages(self.running, self.cache.spec.head_slots) if len(self.running) > 1 else 0
        with concerning(*self.running):
            self._reserved, self._asked = self.cache.step_page_bound(self._slots(self.running)), 0
        return self._reserved + moved  # triggers run before the step, and their pages are free again for the next one

    def _resume(self) -> None:
        while self.swapped:
            with concerning(self.swapped[0]):
                if not self._comes_back(self.swapped[0]):
                    return

    def _comes_back(self, sequence: Sequence) -> bool:
        """Swap the first of those in host memory in, if it fits."""
        assert sequence.swapped is not None
        reserve = self._bound() + self.cache.spec.head_slots if self.running else 0
        if sequence.swapped.num_pages + reserve > self.cache.free_pages or not self.cache.free_slots:
            return False
        if not self._fits_until_it_ends(sequence, self.running):
            return False
        try:
            sequence.slot = self.cache.swap_in(sequence.swapped)
        except (RuntimeError, MemoryError) as error:
            _log.warning("a request is computed anew, since it could not be swapped in: %s", error)
            self._start_anew(self.swapped.popleft())
            return False
        sequence.swapped, sequence.status = None, Status.RUNNING
        self.running.append(self.swapped.popleft())
        return True

    def _admit(self) -> list[Sequence]:
        prompts: list[Sequence] = []
        try:
            self._choose_prompts(prompts)
        except Exception:
            for sequence in reversed(prompts):
                self._take_back(sequence)
            raise
        self.running.extend(prompts)
        return prompts

    def _choose_prompts(self, prompts: list[Sequence]) -> None:
        """Give slots to those that wait, and move them to `prompts`, as long as they fit."""
        free, tokens = self.cache.free_pages - self._bound(), 0
        courses = [self.forecast.course(s) for s in self.running]
        while self.waiting and self.cache.free_slots:
            sequence = self.waiting[0]
            expected = self.forecast.start_pages(sequence)
            tokens += len(sequence.prompt_ids)
            alone = not self.running and not prompts
            if prompts and sequence.prefill_failures:  # it failed beside others: the next try is by itself
                break
            room_for_a_step = self.cache.spec.head_slots
            if not alone and (expected + room_for_a_step > free or (prompts and tokens > self.max_batched_tokens)):
                break
            courses.append(self.forecast.course(sequence))
            careful = self.admission == "careful" and not alone
            if careful and peak(courses) > self.cache.spec.num_pages + self._overcommit():
                break
            free -= expected
            with concerning(sequence):
                sequence.slot = self.cache.admit(sequence.policy.rule)
            sequence.status, sequence.fed = Status.RUNNING, 0
            prompts.append(self.waiting.popleft())
            if sequence.prefill_failures:
                break

    def _make_room(self) -> list[Sequence]:
        """Preempt the newest sequences until the next step fits for sure. A sequence that is alone and still does not
        fit fails.
        """
        while self.running and self._bound() > self.cache.free_pages:
            victim = self.running.pop()
            if not self.running:
                return [victim]
            with concerning(victim):
                self._preempt(victim)
        return []

    def _preempt(self, victim: Sequence) -> None:
        victim.preemptions += 1
        if self.preemption == "swap" and self.swapped_bytes + self.cache.swap_bytes(victim.slot) <= self.swap_bytes:
            try:
                victim.swapped, victim.slot = self.cache.swap_out(victim.slot), -1
            except (RuntimeError, MemoryError) as error:
                _log.warning("a request is computed anew, since it could not be swapped out: %s", error)
            else:
                victim.status = Status.SWAPPED
                self.swapped.appendleft(victim)
                return
        victim.peak_bytes = max(victim.peak_bytes, int(self.cache.peak_bytes(self._slots([victim]))[0]))
        self.cache.release([victim.slot])
        self._start_anew(victim)

    def _start_anew(self, sequence: Sequence) -> None:
        """Of what it had, it keeps its tokens: they are fed again behind its prompt."""
        sequence.slot, sequence.swapped, sequence.fed, sequence.status = -1, None, 0, Status.WAITING
        self.waiting.appendleft(sequence)
