"""The engine: requests in, chunks of text out, one pass a step. Everything that ends a request gives its pages back."""

from __future__ import annotations

import itertools
import time
import traceback
from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

from torch import Tensor

from siftkv.cache import KVCache
from siftkv.engine.binding import BoundPolicy, policy_key
from siftkv.engine.cascade import cascade_of
from siftkv.engine.delivery import Delivery
from siftkv.engine.detokenizer import Decoder as Detokenize
from siftkv.engine.detokenizer import IncrementalDetokenizer, StopChecker
from siftkv.engine.faults import Faults
from siftkv.engine.flights import Flights
from siftkv.engine.layer_costs import layer_costs
from siftkv.engine.outputs import StreamChunk
from siftkv.engine.runner import Runner
from siftkv.engine.sampler import NonFiniteLogits, Sampler, SamplingRow
from siftkv.engine.sampling_params import SamplingParams
from siftkv.engine.scheduler import Admission, Preemption, Scheduler
from siftkv.engine.sequence import Sequence
from siftkv.errors import NumericsError, OutOfPages, RequestError
from siftkv.models import Decoder, ModelConfig
from siftkv.models.fingerprint import model_fingerprint
from siftkv.policies import Policy

_REMEMBERED_POLICIES = 256


class Engine:
    """Runs requests over one model and one cache. Not thread-safe: one thread calls `add`, `step` and `abort`.

    check_integrity: verify the cache's bookkeeping after every step (slow; for tests and debugging).
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        cache: KVCache,
        tokenizer: Detokenize,
        eos_token_ids: SequenceOf[int],
        max_model_len: int,
        max_batched_tokens: int = 8192,
        preemption: Preemption = "swap",
        swap_bytes: int = 4 << 30,
        check_integrity: bool = False,
        admission: Admission = "careful",
    ) -> None:
        self.config = config
        self.cache = cache
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_model_len = max_model_len
        self.runner = Runner(decoder, cache)
        self.scheduler = Scheduler(cache, max_batched_tokens, preemption, swap_bytes, admission)
        self.delivery = Delivery(cache, self.scheduler, self.eos_token_ids)
        self._live: dict[str, list[Sequence]] = {}
        self.faults = Faults(cache, self.scheduler, self.delivery, self._live)
        self.flights = Flights(cache, self.runner, self.scheduler, self.faults)
        self.sampler = Sampler()
        self.check_integrity = check_integrity
        self._policies: OrderedDict[Hashable, BoundPolicy] = OrderedDict()
        self._counter = itertools.count()

    def bind(self, policy: Policy) -> BoundPolicy:
        """A policy bound to this engine's pool. Raises FormatError or PolicyError when it does not fit."""
        key = policy_key(policy)
        known = self._policies.pop(key, None) or self._bound(policy.for_model(self._fingerprint))
        self._policies[key] = known  # most recently used last
        if len(self._policies) > _REMEMBERED_POLICIES:
            self._policies.popitem(last=False)
        return known

    def _bound(self, policy: Policy) -> BoundPolicy:
        bound = BoundPolicy(policy, self.cache.spec)  # refuses what does not fit before layers are measured for it
        if not policy.weighs_layers:
            return bound
        try:
            costs = layer_costs(self.runner.decoder, self.tokenizer)
        except Exception as error:
            self.faults.probe(error, "measuring layers")
            raise
        return BoundPolicy(policy, self.cache.spec, costs)

    def _fingerprint(self) -> str:
        return model_fingerprint(self.runner.decoder)

    def add(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        policy: Policy,
        prompt: str | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request of `params.n` completions and return its id. Raises RequestError, PolicyError, FormatError or
        LibraryFailed, and then nothing is queued; what has ended the engine (see `step`) once something has.
        """
        self.faults.check()
        ids = [int(t) for t in prompt_ids]
        self.check_prompt(ids)
        bound = self.bind(policy)
        request_id = request_id or f"request-{next(self._counter)}"
        if request_id in self._live:
            raise RequestError(f"a request {request_id!r} is already running: use another id")
        limit = self.max_model_len - len(ids)
        sequences = [self._sequence(request_id, i, prompt, ids, params, bound, limit) for i in range(params.n)]
        self._live[request_id] = sequences
        for sequence in sequences:
            self.scheduler.add(sequence)
        return request_id

    @property
    def failed(self) -> bool:
        """Whether every further step raises what has ended the engine."""
        return self.faults.fatal is not None

    def check_prompt(self, ids: list[int]) -> None:
        """Raise RequestError unless a prompt can be run: not empty, inside the vocabulary, shorter than the context."""
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the context holds {self.max_model_len}, "
                "with at least one to generate: "
                "shorten it or raise max_model_len"
            )
        if not 0 <= min(ids) <= max(ids) < self.config.vocab_size:
            wrong = next(t for t in ids if not 0 <= t < self.config.vocab_size)
            raise RequestError(f"token id {wrong} is outside the vocabulary of {self.config.vocab_size}")

    def _sequence(
        self,
        request_id: str,
        index: int,
        prompt: str | None,
        ids: list[int],
        params: SamplingParams,
        bound: BoundPolicy,
        limit: int,
    ) -> Sequence:
        output_ids: list[int] = []
        return Sequence(
            request_id=request_id,
            index=index,
            prompt=prompt,
            prompt_ids=ids,
            params=params,
            policy=bound,
            row=SamplingRow(params, ids, output_ids, self.eos_token_ids, index),
            detokenizer=IncrementalDetokenizer(self.tokenizer, ids),
            stops=StopChecker(params.stop_strings, params.include_stop_str_in_output),
            max_tokens=limit if params.max_tokens is None else min(params.max_tokens, limit),
            output_ids=output_ids,
            cascade=cascade_of(bound, self.cache.spec, ids, index),
        )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.flights.under_way is not None

    def sequences(self, request_id: str) -> list[Sequence]:
        """The completions of a request, running or finished, until `forget`."""
        return self._live[request_id]

    def forget(self, request_id: str) -> None:
        """Drop a finished request's record."""
        self._live.pop(request_id, None)

    def abort(self, request_id: str) -> list[StreamChunk]:
        """End a request at once, wherever it stands; its pages return. Unknown ids are ignored."""
        live = [s for s in self._live.get(request_id, []) if s.finish_reason is None]
        if self.failed:
            return [self.faults.abort(sequence) for sequence in live]
        with self.faults.lasting():
            chunks = [self.faults.abort(sequence) for sequence in live]
            self._verify()
        return chunks

    def step(self) -> list[StreamChunk]:
        """One pass: prompts that were admitted, or one token of each running request. Returns what it added.

        On a GPU greedy steps are pipelined: a call launches a step and returns what the one before it gave. Raises
        DeviceLost when the GPU has failed for good, AssertionError or IntegrityError when the engine's own books are
        wrong; then every further step does.
        """
        with self.faults.lasting():
            chunks = self._step() if self.flights.under_way is None else self.flights.land()
            self._verify()
        return chunks

    def _step(self) -> list[StreamChunk]:
        batch, chunks = self.faults.schedule()
        if batch.prefill:
            return chunks + self._prefill(batch.prefill)
        return chunks + self._decode(batch.decode) if batch.decode else chunks

    def _verify(self) -> None:
        if self.check_integrity:
            self.cache.check_integrity()

    def _prefill(self, sequences: list[Sequence]) -> list[StreamChunk]:
        now = time.perf_counter()
        for sequence in sequences:
            sequence.scheduled = sequence.scheduled or now
        try:
            logits, failures = self.runner.prefill(
                [s.prompt_ids for s in sequences], [s.slot for s in sequences], [s.policy for s in sequences]
            )
            held = self.cache.pages_held(self.cache.state.seen.new_tensor([s.slot for s in sequences])).tolist()
            for sequence, failure, pages in zip(sequences, failures, held, strict=True):
                if failure is None:
                    self.scheduler.forecast.learn_pages(sequence, pages)
        except Exception as error:
            return self.faults.of_prompts(sequences, error)
        chunks, good, short = [], [], []
        for row, (sequence, failure) in enumerate(zip(sequences, failures, strict=True)):
            if failure is None:
                good.append(row)
            elif isinstance(failure, OutOfPages):
                short.append(sequence)
            else:
                chunks.append(self.faults.fail(sequence, failure))
        hopeless = self.scheduler.requeue(short, len(sequences)) if short else []
        chunks += [self.faults.fail(s, self.delivery.too_large(s)) for s in hopeless]
        return chunks + self._next_tokens(sequences, good, logits)

    def _decode(self, sequences: list[Sequence]) -> list[StreamChunk]:
        chunks: list[StreamChunk] = []
        try:
            alone = self.scheduler.leans_on_itself()
            sequences, chunks = self.faults.run_triggers(sequences)
            if alone and sequences and not self.scheduler.has_room():
                return chunks + [self.faults.fail(s, self.delivery.full(s)) for s in sequences]
            if not sequences:
                return chunks
            if self.flights.may_start(sequences):
                return chunks + self.flights.start(sequences)
            logits, flags = self.runner.decode([s.output_ids[s.fed] for s in sequences], [s.slot for s in sequences])
            finite = flags.tolist()
        except Exception as error:
            return chunks + self.faults.of_step(error)
        good = []
        for row, (sequence, ok) in enumerate(zip(sequences, finite, strict=True)):
            sequence.fed += 1
            if ok:
                good.append(row)
            else:
                reason = NumericsError("NaN or infinity in the keys or values of a generated token")
                chunks.append(self.faults.fail(sequence, reason))
        return chunks + self._next_tokens(sequences, good, logits)

    def _next_tokens(self, sequences: list[Sequence], rows: list[int], logits: Tensor) -> list[StreamChunk]:
        """Draw the next token of each of `rows` that needs one; the others are feeding tokens that they already have.

        Whose row raised in a draw is not known: each is drawn again by itself, which gives the same token.
        """
        rows = [row for row in rows if sequences[row].needs_token]
        if not rows:
            return []
        try:
            drawn = self.sampler.sample(logits[rows], [sequences[row].row for row in rows])
        except NonFiniteLogits as error:
            wrong = {rows[i]: error.reason(i) for i in error.rows}
            chunks = [self.faults.fail(sequences[row], reason) for row, reason in wrong.items()]
            return chunks + self._next_tokens(sequences, [row for row in rows if row not in wrong], logits)
        except Exception as error:
            if len(rows) == 1:
                return self.faults.of_request(sequences[rows[0]], "drawing its next token", error)
            traceback.clear_frames(error.__traceback__)  # memory may be what was short
            return [chunk for row in rows for chunk in self._next_tokens(sequences, [row], logits)]
        each = zip(rows, drawn.token_ids, drawn.logprobs, strict=True)
        found = [self.faults.append(sequences[row], token, logprob) for row, token, logprob in each]
        return [chunk for chunks in found for chunk in chunks]
