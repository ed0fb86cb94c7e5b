"""The engine: requests in, chunks of text out, one pass a step. Everything that ends a request gives its pages back."""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from siftkv.cache import KVCache
from siftkv.engine.binding import BoundPolicy, policy_key
from siftkv.engine.cascade import cascade_of, run_due
from siftkv.engine.delivery import Delivery
from siftkv.engine.detokenizer import Decoder as Detokenize
from siftkv.engine.detokenizer import IncrementalDetokenizer, StopChecker
from siftkv.engine.graphs import pages_of_two_steps
from siftkv.engine.layer_costs import layer_costs
from siftkv.engine.outputs import StreamChunk
from siftkv.engine.pipeline import Flight, flies, most_pages, moved_pages
from siftkv.engine.runner import Runner
from siftkv.engine.sampler import NonFiniteLogits, Sampler, SamplingRow
from siftkv.engine.sampling_params import SamplingParams
from siftkv.engine.scheduler import Admission, Preemption, Scheduler
from siftkv.engine.sequence import Sequence
from siftkv.errors import NumericsError, OutOfPages, PromptFailed, RequestError
from siftkv.models import Decoder, ModelConfig
from siftkv.models.fingerprint import model_fingerprint
from siftkv.policies import Policy

_REMEMBERED_POLICIES = 256
_log = logging.getLogger("siftkv.engine")


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
        self.sampler = Sampler()
        self.check_integrity = check_integrity
        self._flight: Flight | None = None
        self._free_pages = 0  # after the step before the one in flight
        self._pages_ahead: int | None = None  # that this one and the next can take, where that was asked
        self._live: dict[str, list[Sequence]] = {}
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
        return BoundPolicy(policy, self.cache.spec, layer_costs(self.runner.decoder, self.tokenizer))

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
        """Queue a request of `params.n` completions and return its id. Raises RequestError, PolicyError or FormatError,
        and then nothing is queued.
        """
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
        return self.scheduler.has_work or self._flight is not None

    def sequences(self, request_id: str) -> list[Sequence]:
        """The completions of a request, running or finished, until `forget`."""
        return self._live[request_id]

    def forget(self, request_id: str) -> None:
        """Drop a finished request's record."""
        self._live.pop(request_id, None)

    def abort(self, request_id: str) -> list[StreamChunk]:
        """End a request at once, wherever it stands; its pages return. Unknown ids are ignored."""
        live = [s for s in self._live.get(request_id, []) if s.finish_reason is None]
        chunks = [self.delivery.finish(sequence, "abort") for sequence in live]
        self._verify()
        return chunks

    def step(self) -> list[StreamChunk]:
        """One pass: prompts that were admitted, or one token of each running request. Returns what it added.

        On a GPU greedy steps are pipelined: a call launches a step and returns what the one before it gave.
        """
        if self._flight is not None:
            chunks = self._land(self._flight)
        else:
            batch = self.scheduler.schedule()
            chunks = [self.delivery.finish(sequence, "abort") for sequence in batch.failed]
            if batch.prefill:
                chunks += self._prefill(batch.prefill)
            elif batch.decode and self._may_fly(batch.decode):
                self._free_pages = self.cache.free_pages
                self._pages_ahead = int(pages_of_two_steps(self.cache.state, self._slots(batch.decode)))
                self._flight = self._launch(batch.decode, None)
            elif batch.decode:
                chunks += self._decode(batch.decode)
        self._verify()
        return chunks

    def _may_fly(self, sequences: list[Sequence]) -> bool:
        return self.runner.graphs is not None and all(flies(s) for s in sequences)

    def _launch(self, sequences: list[Sequence], before: Flight | None) -> Flight:
        """Launch a step of `sequences`; their tokens come from `before`, where they are still on the way, or from the
        host. Where free pages run short, the device is asked how many of them the steps after it can take.
        """
        graphs = self.runner.graphs
        assert graphs is not None
        run_due(self.cache, [(s.cascade, s.slot, s.seen + (before is not None)) for s in sequences])
        slots = torch.tensor([s.slot for s in sequences]).pin_memory()
        if before is None:
            tokens = torch.tensor([s.output_ids[s.fed] for s in sequences]).pin_memory()
        else:
            places = {id(s): row for row, s in enumerate(before.sequences)}
            rows = torch.tensor([places[id(s)] for s in sequences]).pin_memory()
            tokens = before.landing.tokens[rows.to(before.landing.tokens.device, non_blocking=True)]
        short = self._free_pages < 4 * most_pages(sequences, self.cache.spec.head_slots)
        with torch.inference_mode():
            return Flight(sequences, graphs.launch(tokens, slots, short))

    def _land(self, flight: Flight) -> list[StreamChunk]:
        """Launch the next step if nothing stands against it, then take in what `flight` brought."""
        live = [s for s in flight.sequences if s.finish_reason is None]
        going_on = [s for s in live if len(s.output_ids) + 1 < s.max_tokens]
        needed = 2 * most_pages(going_on, self.cache.spec.head_slots)
        if self._pages_ahead is not None:
            needed = min(needed, self._pages_ahead)
        needed += moved_pages(going_on, self.cache.spec.head_slots, ahead=1)
        self._flight = None
        if going_on and needed <= self._free_pages and not self.scheduler.wants_turn(self._free_pages):
            self._flight = self._launch(going_on, flight)
        tokens, finite, self._free_pages, self._pages_ahead = flight.landing.wait()
        self.delivery.foresee([s for s in live if len(s.output_ids) + 1 >= s.max_tokens])
        chunks = []
        for sequence, token, ok in zip(flight.sequences, tokens, finite, strict=True):
            if sequence.finish_reason is None:  # else it ended by itself or was aborted while this step was on its way
                sequence.fed += 1
                error = NumericsError("NaN or infinity in the cache or the logits of a generated token")
                chunks.append(
                    self.delivery.append(sequence, token, None) if ok else self.delivery.fail(sequence, error)
                )
        return chunks

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
        except (torch.AcceleratorError, AssertionError):  # the device, or what this engine knows of it, is lost
            raise
        except Exception as error:
            return self._after_fault(sequences, error)
        chunks, good, short = [], [], []
        held = self.cache.pages_held(self._slots(sequences)).tolist()
        for row, (sequence, failure) in enumerate(zip(sequences, failures, strict=True)):
            if failure is None:
                good.append(row)
                self.scheduler.forecast.learn_pages(sequence, held[row])
            elif isinstance(failure, OutOfPages):
                short.append(sequence)
            else:
                chunks.append(self.delivery.fail(sequence, failure))
        hopeless = self.scheduler.requeue(short, len(sequences)) if short else []
        chunks += [self.delivery.fail(sequence, self._too_large(sequence)) for sequence in hopeless]
        return chunks + self._next_tokens([sequences[row] for row in good], logits[good])

    def _after_fault(self, sequences: list[Sequence], error: Exception) -> list[StreamChunk]:
        """Whose prompt raised in a pass is not known: each is tried again by itself. One that is by itself ends."""
        _log.error("a pass over %d prompts failed", len(sequences), exc_info=error)
        if len(sequences) > 1:
            self.scheduler.requeue(sequences, len(sequences))
            return []
        return [self.delivery.fail(sequences[0], PromptFailed(f"its prompt could not be processed: {error!r}"))]

    def _too_large(self, sequence: Sequence) -> OutOfPages:
        return OutOfPages(
            f"a prompt of {len(sequence.prompt_ids)} tokens does not fit a pool of {self.cache.spec.num_pages} pages "
            f"under {sequence.policy.name}: raise kv_cache_memory_bytes, or use a kv setting that keeps less"
        )

    def _decode(self, sequences: list[Sequence]) -> list[StreamChunk]:
        tokens = [s.output_ids[s.fed] for s in sequences]
        run_due(self.cache, [(s.cascade, s.slot, s.seen) for s in sequences])
        logits, finite = self.runner.decode(tokens, [s.slot for s in sequences])
        chunks, good = [], []
        for row, (sequence, ok) in enumerate(zip(sequences, finite.tolist(), strict=True)):
            sequence.fed += 1
            if ok:
                good.append(row)
            else:
                chunks.append(
                    self.delivery.fail(
                        sequence, NumericsError("NaN or infinity in the keys or values of a generated token")
                    )
                )
        return chunks + self._next_tokens([sequences[row] for row in good], logits[good])

    def _slots(self, sequences: list[Sequence]) -> Tensor:
        return self.cache.state.seen.new_tensor([s.slot for s in sequences])

    def _next_tokens(self, sequences: list[Sequence], logits: Tensor) -> list[StreamChunk]:
        """Draw the next token of each sequence that needs one; the others are feeding tokens that they already have."""
        rows = [row for row, s in enumerate(sequences) if s.needs_token]
        chunks: list[StreamChunk] = []
        while rows:
            try:
                drawn = self.sampler.sample(logits[rows], [sequences[row].row for row in rows])
            except NonFiniteLogits as error:
                wrong = {rows[i]: error.reason(i) for i in error.rows}
                chunks += [self.delivery.fail(sequences[row], reason) for row, reason in wrong.items()]
                rows = [row for row in rows if row not in wrong]
                continue
            for row, token, logprob in zip(rows, drawn.token_ids, drawn.logprobs, strict=True):
                chunks.append(self.delivery.append(sequences[row], token, logprob))
            break
        return chunks
