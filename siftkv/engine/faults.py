"""Errors that nobody foresaw, while requests run: who ends, and who does not.

An error that came up while one request was served (its trigger, its draw, its text) ends that request. A pass over
several prompts is tried again prompt by prompt. A decode step belongs to nobody: it ends all that run, and what waits
goes on. Afterwards pages are where they belong, and that is checked. Only what makes the engine itself useless ends it:
a GPU that does not answer any more, and broken invariants.
"""

from __future__ import annotations

import logging
import traceback

import torch

from siftkv.attention.decode import choosers
from siftkv.cache import KVCache
from siftkv.cache.recovery import discard
from siftkv.engine.cascade import trigger
from siftkv.engine.delivery import Delivery
from siftkv.engine.outputs import StreamChunk, TokenLogprob
from siftkv.engine.scheduler import Scheduler
from siftkv.engine.sequence import Sequence
from siftkv.errors import DeviceLost, IntegrityError, PromptFailed, SiftKVError, StepFailed

_log = logging.getLogger("siftkv.engine")


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

    def __init__(self, cache: KVCache, scheduler: Scheduler, delivery: Delivery) -> None:
        self.cache = cache
        self.scheduler = scheduler
        self.delivery = delivery
        self.device_lost = False

    def of_prompts(self, sequences: list[Sequence], error: Exception) -> list[StreamChunk]:
        """Whose prompt raised in a pass is not known: each is tried again by itself. One that is by itself ends."""
        self._survive(error, f"a pass over {len(sequences)} prompts")
        if len(sequences) == 1:
            return self._end(sequences, PromptFailed, "its prompt could not be processed", error)
        self._settle(sequences)
        self.scheduler.requeue(sequences, len(sequences))
        return []

    def of_step(self, error: Exception) -> list[StreamChunk]:
        """A decode step failed: all that run end. Waiting and swapped requests go on."""
        self._survive(error, "a decode step")
        choosers(self.cache).clear()  # of a step that did not come to ask them
        return self._end(list(self.scheduler.running), StepFailed, "a decode step failed", error)

    def of_request(self, sequence: Sequence, what: str, error: Exception) -> list[StreamChunk]:
        """`what` failed, which concerns one request. Others that run keep everything."""
        self._survive(error, what)
        return self._end([sequence], StepFailed, f"{what} failed", error)

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

    def append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> list[StreamChunk]:
        """`Delivery.append`, whose errors concern one request."""
        try:
            return [self.delivery.append(sequence, token, logprob)]
        except Exception as error:
            return self.of_request(sequence, "making text of its tokens", error)

    def _survive(self, error: Exception, what: str) -> None:
        """Raise if the engine cannot go on; else note the error, and drop what its frames hold on to."""
        if isinstance(error, (AssertionError, IntegrityError)):
            raise error
        self.device_lost = self.device_lost or not answers(self.cache.state.pages.device)
        if self.device_lost:
            raise DeviceLost(
                f"{what} failed and the GPU does not answer any more ({_brief(error)}): start again, and if it comes "
                "back look at the driver's log (dmesg)"
            ) from error
        _log.error("%s failed", what, exc_info=error)
        traceback.clear_frames(error.__traceback__)

    def _end(
        self, sequences: list[Sequence], kind: type[SiftKVError], what: str, error: Exception
    ) -> list[StreamChunk]:
        self._settle(sequences)
        reason = f"{what}: {_brief(error)}"
        return [self.delivery.fail(sequence, kind(reason), closed=True) for sequence in sequences]

    def _settle(self, sequences: list[Sequence]) -> None:
        """Give back what sequences hold. No report is made of it: the error may have left it half changed."""
        discard(self.cache, [s.slot for s in sequences if s.slot >= 0])
        for sequence in sequences:
            sequence.slot = -1
        self.cache.check_integrity()


def _brief(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU's memory ran out; lower gpu_memory_utilization or max_num_batched_tokens"
    return repr(error)[:500]
