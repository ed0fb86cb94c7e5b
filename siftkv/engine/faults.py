"""Errors that nobody foresaw, while requests run: who ends, and who does not.

An error that came up while one request was served (its trigger, its draw, its text) or looked at (to choose who runs)
ends that request. A pass over several prompts is tried again prompt by prompt. A decode step belongs to nobody: it ends
all that run, and what waits goes on. Afterwards pages are where they belong, and that is checked. Only what makes the
engine itself useless ends it, for good: a GPU that does not answer any more, and broken invariants.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from siftkv.attention.decode import choosers
from siftkv.cache import KVCache
from siftkv.cache.recovery import discard
from siftkv.engine.cascade import trigger
from siftkv.engine.concerned import Concerned
from siftkv.engine.delivery import Delivery
from siftkv.engine.outputs import StreamChunk, TokenLogprob
from siftkv.engine.scheduler import Batch, Scheduler
from siftkv.engine.sequence import Sequence, Status
from siftkv.errors import DeviceLost, IntegrityError, PromptFailed, SiftKVError, StepFailed

_log = logging.getLogger("siftkv.engine")
_FATAL = (AssertionError, IntegrityError, DeviceLost)


def answers(device: torch.device) -> bool:
    """Whether a device still works: an error that has broken its context comes back at every call."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except Exception:
        return False
    return True


class Faults:
    """Ends requests that an error has hit. Every method raises DeviceLost where the device is lost, and the error
    itself where it says that the engine's own books are wrong (AssertionError, IntegrityError).
    """

    def __init__(
        self, cache: KVCache, scheduler: Scheduler, delivery: Delivery, live: Mapping[str, list[Sequence]]
    ) -> None:
        self.cache = cache
        self.scheduler = scheduler
        self.delivery = delivery
        self.live = live
        """The completions of every request, wherever they stand."""
        self.fatal: Exception | None = None
        """What has ended the engine."""

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """What ends the engine in here is raised again at once by whoever comes later: the device is not touched."""
        self.check()
        try:
            with self._stopping():
                yield
        except _FATAL as error:
            self.fatal = error
            raise

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Where a user stops a step somewhere in the middle (KeyboardInterrupt), all end who may be half changed."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            queued = {*self.scheduler.waiting, *self.scheduler.swapped}
            unfinished = [s for every in self.live.values() for s in every if s.status is not Status.FINISHED]
            halved = [s for s in unfinished if s.slot >= 0 or s not in queued]
            for sequence in halved:
                sequence.slot = -1
            discard(self.cache, list(range(self.cache.spec.max_slots)))  # also one that had been given to nobody yet
            choosers(self.cache).clear()
            self._end(halved, StepFailed, "a step was stopped", error)
            raise

    def check(self) -> None:
        """Raise what has ended the engine."""
        if self.fatal is not None:
            raise self.fatal.with_traceback(None)

    def schedule(self) -> tuple[Batch, list[StreamChunk]]:
        """`Scheduler.schedule`, and what it says of those that can never fit. Where it raises nothing runs, and those
        end whom the error concerns, or who were considered.
        """
        try:
            batch = self.scheduler.schedule()
        except Exception as error:
            waiting = [queue[0] for queue in (self.scheduler.swapped, self.scheduler.waiting) if queue]
            return Batch(), self._of(self.scheduler.running + waiting, "choosing who runs next", error)
        return batch, [self.fail(s, self.delivery.full(s)) for s in batch.failed]

    def of_prompts(self, sequences: list[Sequence], error: Exception) -> list[StreamChunk]:
        """Whose prompt raised in a pass is not known: each is tried again by itself. One that is by itself ends."""
        error = self._survive(error, f"a pass over {len(sequences)} prompts")
        if len(sequences) == 1:
            return self._end(sequences, PromptFailed, "its prompt could not be processed", error)
        self._settle(sequences)
        self.scheduler.requeue(sequences, len(sequences))
        return []

    def of_step(self, error: Exception) -> list[StreamChunk]:
        """A decode step failed: all that run end, unless it is known whom the error concerns. Waiting and swapped
        requests go on.
        """
        choosers(self.cache).clear()  # of a step that did not come to ask them
        return self._of(self.scheduler.running, "a decode step", error)

    def of_request(self, sequence: Sequence, what: str, error: Exception) -> list[StreamChunk]:
        """`what` failed, which concerns one request. Others that run keep everything."""
        return self._of([sequence], what, error)

    def _of(self, sequences: list[Sequence], what: str, error: Exception) -> list[StreamChunk]:
        if isinstance(error, Concerned):
            sequences = [s for s in error.sequences if s.finish_reason is None]
        error = self._survive(error, what)
        return self._end(list(sequences), StepFailed, f"{what} failed", error)

    def run_triggers(self, sequences: list[Sequence], ahead: int = 0) -> tuple[list[Sequence], list[StreamChunk]]:
        """Run what is due before the next tokens of sequences are fed; returns who goes on. ahead: tokens that are on
        their way.
        """
        chunks = []
        for sequence in sequences:
            try:
                trigger(self.cache, sequence.cascade, sequence.slot, sequence.seen + ahead)
            except Exception as error:
                chunks += self.of_request(sequence, "a trigger of its policy", error)
        return [s for s in sequences if s.finish_reason is None], chunks

    def foresee(self, sequences: list[Sequence]) -> None:
        """`Delivery.foresee`. What cannot be read ahead is read when it is needed."""
        try:
            self.delivery.foresee(sequences)
        except Exception as error:
            self._survive(error, "reading reports ahead")

    def append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> list[StreamChunk]:
        """`Delivery.append`, whose errors concern one request."""
        before = len(sequence.output_ids)
        try:
            return [self.delivery.append(sequence, token, logprob)]
        except Exception as error:
            chunks = self.of_request(sequence, "making text of its tokens", error)
            return [_handed(chunk, sequence, before) for chunk in chunks]

    def fail(self, sequence: Sequence, reason: SiftKVError, closed: bool = False) -> StreamChunk:
        """`Delivery.fail`, whatever happens in it."""
        return self._surely(sequence, lambda again: self.delivery.fail(sequence, reason, closed or again))

    def abort(self, sequence: Sequence) -> StreamChunk:
        """`Delivery.finish` of a request that is not wanted any more, whatever happens in it."""
        return self._surely(sequence, lambda again: self.delivery.finish(sequence, "abort", closed=again))

    def _surely(self, sequence: Sequence, end: Callable[[bool], StreamChunk]) -> StreamChunk:
        if self.fatal is not None:  # then there are no pages either
            sequence.slot = -1
            return end(True)
        before = len(sequence.output_ids)
        try:
            return end(False)
        except Exception as error:
            self._survive(error, f"ending request {sequence.request_id}")
            self._settle([sequence])
            return _handed(end(True), sequence, before)

    def _survive(self, error: Exception, what: str) -> Exception:
        """Raise if the engine cannot go on; else note the error itself, which is returned, and drop what its frames
        hold on to.
        """
        if isinstance(error, Concerned) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        if isinstance(error, _FATAL):
            raise error
        self.probe(error, what)
        _log.error("%s failed", what, exc_info=error)
        traceback.clear_frames(error.__traceback__)
        return error

    def probe(self, error: Exception, what: str) -> None:
        """Raise DeviceLost, and from now on, if that is what `error` came from."""
        if not answers(self.cache.state.pages.device):
            self.fatal = DeviceLost(
                f"{what} failed and the GPU does not answer any more ({_brief(error)}): start again, and if it comes "
                "back look at the driver's log (dmesg)"
            )
            raise self.fatal from error

    def _end(
        self, sequences: list[Sequence], kind: type[SiftKVError], what: str, error: BaseException
    ) -> list[StreamChunk]:
        self._settle(sequences)
        reason = f"{what}: {_brief(error)}"
        return [self.fail(sequence, kind(reason), closed=True) for sequence in sequences]

    def _settle(self, sequences: list[Sequence]) -> None:
        """Give back what sequences hold. No report is made of it: the error may have left it half changed."""
        discard(self.cache, [s.slot for s in sequences if s.slot >= 0])
        for sequence in sequences:
            sequence.slot = -1
        self.cache.check_integrity()


def _handed(chunk: StreamChunk, sequence: Sequence, before: int) -> StreamChunk:
    """A last chunk with what its request was given since it had `before` tokens. Each of them had made one piece of
    text, if an empty one.
    """
    return replace(
        chunk,
        text="".join(sequence.stops.pieces[before:]),
        token_ids=sequence.output_ids[before:],
        logprobs=sequence.logprobs[before:] or None,
    )


def _brief(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU's memory ran out; lower gpu_memory_utilization or max_num_batched_tokens"
    return str(error) if isinstance(error, SiftKVError) else repr(error)[:500]
