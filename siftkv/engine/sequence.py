"""One completion on its way through the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

from siftkv.cache.swap import SwappedRequest
from siftkv.engine.binding import BoundPolicy
from siftkv.engine.cascade import Cascade
from siftkv.engine.detokenizer import IncrementalDetokenizer, StopChecker
from siftkv.engine.outputs import CompletionOutput, FinishReason, KVReport, RequestMetrics, TokenLogprob
from siftkv.engine.sampler import SamplingRow
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import SiftKVError


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A completion: what was asked, what was generated, and where it stands.

    fed: how many of `output_ids` have gone through the decode path. A new token is drawn when all have; after a
        preemption by recomputation the prompt is prefilled again and the generated tokens are fed again, through the
        same decode policy.
    cascade: its triggers, under a policy that has some.
    """

    request_id: str
    index: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    policy: BoundPolicy
    row: SamplingRow
    detokenizer: IncrementalDetokenizer
    stops: StopChecker
    max_tokens: int
    output_ids: list[int]
    cascade: Cascade | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    fed: int = 0
    slot: int = -1
    status: Status = Status.WAITING
    swapped: SwappedRequest | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: SiftKVError | None = None
    peak_bytes: int = 0
    kv: KVReport | None = None
    prefill_failures: int = 0
    preemptions: int = 0
    arrival: float = field(default_factory=time.perf_counter)
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def seen(self) -> int:
        """Tokens that went through the cache, those of steps that have not landed left out."""
        return len(self.prompt_ids) + self.fed

    @property
    def needs_token(self) -> bool:
        """Whether the next logits are for a token that is not known yet."""
        return self.fed == len(self.output_ids)

    def output(self) -> CompletionOutput:
        """The completion as it stands."""
        return CompletionOutput(
            index=self.index,
            text=self.stops.text,
            token_ids=list(self.output_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=list(self.logprobs) if self.params.logprobs is not None else None,
            kv=self.kv,
        )

    def metrics(self) -> RequestMetrics:
        return RequestMetrics(
            queue_s=max(0.0, self.scheduled - self.arrival),
            first_token_s=max(0.0, self.first_token - self.arrival),
            total_s=max(0.0, self.finished - self.arrival),
            preemptions=self.preemptions,
        )
