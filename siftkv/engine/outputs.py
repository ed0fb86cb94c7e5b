"""What a request gives back: text, tokens, log-probabilities, and what its KV cache cost."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
"""stop: an end token, stop token or stop string; length: max_tokens or the context limit; abort: cancelled, failed."""

DROPPED = "dropped"


@dataclass(frozen=True)
class KVReport:
    """What the KV cache of one completion holds and costs. Bytes count K and V of all layers and kv heads.

    An *entry* is the K and V of one token in one kv head of one layer; `tokens_by_tier` and `per_head_tokens`
    count entries, so that a fractional share of a token is never needed when heads keep different tokens.
    """

    policy: str
    """The `kv` setting that the cache was sifted by."""
    tokens_seen: int
    """Tokens that went through the cache: the prompt and the generated tokens that were fed back."""
    physical_bytes: int
    """Bytes held when the report was made: pages (padding included), the window, and its share of
    every table and side buffer."""
    peak_bytes: int
    """The most bytes held at any time."""
    bf16_bytes: int
    """Bytes that the same tokens take unsifted, in bfloat16, without padding."""
    tokens_by_tier: dict[str, int]
    """Entries in each tier: each storage format, "window" (recent, not yet sifted) and "dropped"."""
    pages: int
    """Pages held when the report was made."""
    per_head_tokens: list[list[list[int]]] = field(default_factory=list)
    """Entries of each head, [L, H, tiers]; the tiers are in the order of `tokens_by_tier`."""

    @property
    def ratio(self) -> float:
        """`physical_bytes / bf16_bytes`: below 1 the cache is smaller than an unsifted one; 0 for an empty one."""
        return self.physical_bytes / self.bf16_bytes if self.bf16_bytes else 0.0

    @property
    def bytes_per_live_token(self) -> float:
        """Bytes that one entry which is not dropped takes, padding included; 0 for an empty cache."""
        live = sum(count for tier, count in self.tokens_by_tier.items() if tier != DROPPED)
        return self.physical_bytes / live if live else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All fields, `ratio` and `bytes_per_live_token`, made of JSON types only."""
        return asdict(self) | {"ratio": self.ratio, "bytes_per_live_token": self.bytes_per_live_token}


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probabilities at one generated token, of the model's raw distribution.

    Raw means: softmax of the logits before penalties, bans, temperature and truncation.
    """

    token_id: int
    """The token that was chosen."""
    logprob: float
    """Its log-probability."""
    top: dict[int, float]
    """The likeliest tokens, best first, as many as were asked for; the chosen one only if it is one of them."""


@dataclass
class CompletionOutput:
    """One completion of a request."""

    index: int
    """0 to n - 1."""
    text: str
    """Generated text; ends before the stop string unless that was to be included."""
    token_ids: list[int]
    """Generated tokens, with those whose text a stop string cut off."""
    finish_reason: FinishReason | None = None
    """Why it ended; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or the stop string that ended it; None for the model's own end token and other reasons."""
    logprobs: list[TokenLogprob] | None = None
    """One for each generated token; None unless asked for."""
    kv: KVReport | None = None
    """What its cache held at the end; None while it runs."""


@dataclass(frozen=True)
class RequestMetrics:
    """Where the time of one request went. Times in seconds, from the arrival of the request."""

    queue_s: float
    """Until it was first scheduled."""
    first_token_s: float
    """Until its first token."""
    total_s: float
    """Until it finished."""
    preemptions: int = 0
    """Times that its cache was given up for others and built again."""


@dataclass
class RequestOutput:
    """All completions of one request."""

    request_id: str
    """Unique among the requests of an engine."""
    prompt: str | None
    """The prompt's text; None for a prompt given as token ids."""
    prompt_token_ids: list[int]
    """The prompt's tokens."""
    outputs: list[CompletionOutput]
    """n completions, by index."""
    metrics: RequestMetrics | None = None
    """Timings; None while it runs."""

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def kv(self) -> KVReport | None:
        """What the cache of the first completion held at its end."""
        return self.outputs[0].kv


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to one completion."""

    request_id: str
    """The request."""
    index: int
    """The completion within it, 0 to n - 1."""
    text: str
    """Text to append; "" while a character or a possible stop string is incomplete."""
    token_ids: Sequence[int]
    """Tokens that the step added."""
    logprobs: Sequence[TokenLogprob] | None = None
    """One for each of `token_ids`; None unless asked for."""
    finish_reason: FinishReason | None = None
    """Set on the completion's last chunk."""
    output: CompletionOutput | None = None
    """The whole completion, on its last chunk; its text is the chunks' texts joined."""
