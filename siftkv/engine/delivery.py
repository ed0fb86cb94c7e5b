"""What a drawn token does to its request: text, stops and limits; and how a request ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf

from siftkv.cache import KVCache
from siftkv.engine.outputs import StreamChunk, TokenLogprob
from siftkv.engine.report import read_counts, report_of
from siftkv.engine.scheduler import Scheduler
from siftkv.engine.sequence import Sequence
from siftkv.errors import OutOfPages, SiftKVError

_log = logging.getLogger("siftkv.engine")


class Delivery:
    """Turns tokens into chunks of text. eos_token_ids: those that end an answer."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, eos_token_ids: tuple[int, ...]) -> None:
        self.cache = cache
        self.scheduler = scheduler
        self.eos_token_ids = eos_token_ids
        self._counts: dict[Sequence, list[int]] = {}

    def foresee(self, sequences: SequenceOf[Sequence]) -> None:
        """Sequences will end with their next token, by their limit: what their reports need is read in one go."""
        counts = read_counts(self.cache, [s.slot for s in sequences]) if sequences else []
        self._counts = dict(zip(sequences, counts, strict=True))

    def append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> StreamChunk:
        """Take in a drawn token: text, stops, limits."""
        params, stops = sequence.params, sequence.stops
        sequence.first_token = sequence.first_token or time.perf_counter()
        sequence.output_ids.append(token)
        if logprob is not None:
            sequence.logprobs.append(logprob)
        count = len(sequence.output_ids)
        may_stop = count > params.min_tokens
        if token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
            sequence.stop_reason = None if token in self.eos_token_ids else token
            return self.finish(sequence, "stop", [token], logprob, may_stop=False)
        text = stops.append(sequence.detokenizer.append(token), may_stop=may_stop)
        if stops.stop_reason is not None:
            sequence.stop_reason = stops.stop_reason
            return self.finish(sequence, "stop", [token], logprob, text, closed=True)
        if count >= sequence.max_tokens:
            return self.finish(sequence, "length", [token], logprob, text, may_stop=may_stop)
        return self._chunk(sequence, text, [token], logprob)

    def fail(self, sequence: Sequence, error: SiftKVError, closed: bool = False) -> StreamChunk:
        """End a sequence by an error, which names its request. closed: without the text that was held back."""
        sequence.error = type(error)(f"request {sequence.request_id}: {error}")
        return self.finish(sequence, "abort", closed=closed)

    def full(self, sequence: Sequence) -> OutOfPages:
        """Why a sequence that has the pool to itself cannot go on."""
        return OutOfPages(
            f"the pool of {self.cache.spec.num_pages} pages is full after {len(sequence.output_ids)} tokens: "
            "raise kv_cache_memory_bytes, or use a kv setting that keeps less"
        )

    def too_large(self, sequence: Sequence) -> OutOfPages:
        """Why its prompt cannot start."""
        return OutOfPages(
            f"a prompt of {len(sequence.prompt_ids)} tokens does not fit a pool of {self.cache.spec.num_pages} pages "
            f"under {sequence.policy.name}: raise kv_cache_memory_bytes, or use a kv setting that keeps less"
        )

    def finish(
        self,
        sequence: Sequence,
        reason: str,
        tokens: list[int] | None = None,
        logprob: TokenLogprob | None = None,
        text: str = "",
        closed: bool = False,
        may_stop: bool = False,
    ) -> StreamChunk:
        """End a sequence: text that was held back comes out (unless `closed`), the cache's report is taken, pages
        return.
        """
        if not closed:
            text += self._held_back(sequence, reason, may_stop)
            if sequence.stops.stop_reason is not None:
                reason, sequence.stop_reason = "stop", sequence.stops.stop_reason
        sequence.finish_reason = reason  # type: ignore[assignment]
        sequence.finished = time.perf_counter()
        if sequence.slot >= 0:
            counts = self._counts.pop(sequence, None) or read_counts(self.cache, [sequence.slot])[0]
            sequence.kv = report_of(self.cache, counts, sequence.policy.name, sequence.peak_bytes)
        self.scheduler.remove(sequence)
        return self._chunk(sequence, text, tokens or [], logprob)

    def _held_back(self, sequence: Sequence, reason: str, may_stop: bool) -> str:
        """Text that waited for more. A request that is to end in any case does not fail by it."""
        try:
            return sequence.stops.close(sequence.detokenizer.flush(), may_stop)
        except Exception as error:
            if reason != "abort" or isinstance(error, AssertionError):
                raise
            _log.exception("the last text of request %s is lost", sequence.request_id)
            return ""

    def _chunk(self, sequence: Sequence, text: str, tokens: list[int], logprob: TokenLogprob | None) -> StreamChunk:
        return StreamChunk(
            request_id=sequence.request_id,
            index=sequence.index,
            text=text,
            token_ids=tokens,
            logprobs=[logprob] if logprob is not None else None,
            finish_reason=sequence.finish_reason,
            output=sequence.output() if sequence.finish_reason is not None else None,
        )
