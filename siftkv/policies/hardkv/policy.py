"""`hardkv`: recent tokens dense, older ones while queries vote for them, a fixed budget of the oldest.

Source: "Hard-KV" (arXiv 2606.28831). What differs from the paper, on purpose: the count of a token set is exact by
default (no temperature); votes are counted and causal; a head never fills up with tokens that nobody voted for; what is
freed is freed a head, not a token of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import DENSE_DTYPES, Tier, TierFormat
from siftkv.policies.base import DROPPED, UNLIMITED, DecodeRule, Policy, PromptView
from siftkv.policies.hardkv.calibration import HeadCalibration
from siftkv.policies.hardkv.metrics import METRICS, Metric
from siftkv.policies.hardkv.rows import LayerTokens
from siftkv.policies.hardkv.selection import Votes, capped, top_k, vote
from siftkv.policies.hardkv.settings import budget_of, check_settings
from siftkv.policies.importance import sampled_rows


@dataclass(frozen=True)
class HardKV(Policy):
    """Keep what the last queries need: at every trigger each query and query head votes for the tokens that make up its
    share `p` of attention, and tokens without a vote lose their place.

    p: share of attention to keep, in (0, 1]; 1 drops nothing.
    metric: what tokens are ranked by: `attention`, `snapkv` (largest logit within `pool` positions), `rkv` (attention
        less redundancy) or `accumulated` (mean attention so far).
    window: recent tokens at 16 bits, sinks: first tokens at 16 bits; neither is ever in question.
    lower, upper: tokens of context. Below `lower` nothing happens, up to `upper` votes are collected, above it what has
        none is taken away.
    interval: positions between two triggers of a request.
    budget: the most that is kept: tokens a head with window and sinks (1024), or bytes of a request's pages (`8MiB`),
        shared out between its heads by votes; None = what has votes.
    condense: what becomes of the others: `evict`, or `merge` into what stays.
    format: of tokens that were rewritten: `dense` (the model's own) or any other, such as k8v4.
    calibrate: `rank` = exact counts, `temperature` = counts from a temperature a head that is solved now and then.
    group: `union` = every query head votes, `max` = a group votes once, by the maximum of its heads.
    memory: whether a vote of an earlier trigger keeps a token as well; else earlier votes only rank under a budget.
    sparse_loading: up to `upper`, attention skips pages without a token that has votes.
    layout: `true` = each head its own length; `max` = every head padded to the longest, for comparison.
    select: `votes`, or `topk` = every head keeps the `budget` tokens that the metric likes best on average, for
        comparison.
    queries: last queries that vote; 0 (with `accumulated` only) = the scores stand for them.
    pool: positions of `snapkv`, odd. refresh: with `accumulated`, positions between two updates of scores.
    """

    name: ClassVar[str] = "hardkv"
    padded: ClassVar[bool] = True

    p: float = 0.9
    metric: str = "attention"
    window: int = 64
    sinks: int = 4
    lower: int = 1024
    upper: int = 2048
    interval: int = 128
    budget: int | str | None = None
    condense: Literal["evict", "merge"] = "evict"
    format: str = "dense"
    calibrate: Literal["rank", "temperature"] = "rank"
    group: Literal["union", "max"] = "union"
    memory: bool = False
    sparse_loading: bool = False
    layout: Literal["true", "max"] = "true"
    select: Literal["votes", "topk"] = "votes"
    queries: int = 32
    pool: int = 7
    refresh: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", budget_of(self.budget))
        check_settings(self)

    @property
    def query_rows(self) -> int:
        return self.queries

    @property
    def skips(self) -> bool:
        return self.sparse_loading

    def check_context(self, max_len: int) -> None:
        if self.window + self.sinks >= max_len:
            raise PolicyError(
                f"window={self.window} and sinks={self.sinks} leave nothing of a context of {max_len} tokens to choose "
                "from: lower window, or raise max_model_len"
            )

    @property
    def ranks_by(self) -> Metric:
        """The metric."""
        return METRICS[self.metric](self.pool)

    @property
    def head_budget(self) -> int:
        """Tokens that a head may keep beside window and sinks."""
        return self.budget - self.window - self.sinks if isinstance(self.budget, int) else UNLIMITED

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        merges = self.condense == "merge"
        names = [dense] if self.format in ("dense", dense) else [dense, self.format]
        return tuple(Tier(TierFormat.parse(name), votes=True, weights=merges) for name in names)

    def rows(self, length: int) -> tuple[Tensor, Tensor] | None:
        return sampled_rows(length) if self.metric == "accumulated" else None

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        count = 1 if self.format == "dense" else 2
        cap = torch.zeros(num_layers, num_kv_heads, count, dtype=torch.int64)
        cap[..., 0] = UNLIMITED
        scored = min(self.refresh, self.window) if self.metric == "accumulated" else 0
        return DecodeRule(torch.zeros(cap.shape), cap, scored)

    def classify(self, prompt: PromptView) -> Tensor:
        """Tiers of a prompt: above `upper` its last queries vote at once, else everything is dense.

        Merging, padding and a budget in bytes wait for the trigger that follows the prompt.
        """
        lengths = prompt.lengths or (prompt.length,)
        if not any(map(self.selects_prompt, lengths)):
            return torch.zeros(prompt.score.shape, dtype=torch.int8, device=prompt.score.device)
        assert prompt.k is not None
        keep = self._of_prompts(prompt)
        rewritten = 0 if self.format == "dense" or DENSE_DTYPES.get(self.format) == prompt.k.dtype else 1
        tier = torch.where(keep, rewritten, DROPPED).to(torch.int8)
        for own, length in zip(tier, lengths, strict=False):
            if not self.selects_prompt(length):
                own.zero_()
        return tier

    def selects_prompt(self, length: int) -> bool:
        """Whether `classify` selects from a prompt of `length` tokens at once."""
        alone = self.condense == "evict" and self.layout == "true" and not isinstance(self.budget, str)
        return length > self.upper and alone

    def _of_prompts(self, prompt: PromptView) -> Tensor:
        """Bool `[R, H, n]`: what the last queries of each prompt keep.

        Padded prompts end together, and only differences of positions count here, so places stand for positions.
        """
        assert prompt.q is not None
        assert prompt.k is not None
        (prompts, heads, length), places = prompt.score.shape, prompt.position
        first, every = max(0, length - self.queries), prompts * heads
        position = places.expand(prompts, length)
        if prompt.lengths is not None:
            padding = torch.stack([places < length - own for own in prompt.lengths])
            position = position.masked_fill(padding, -1)
        protected = prompt.protected.expand(prompts, length)
        tokens = LayerTokens(
            q=prompt.q[:, first:].transpose(0, 1).flatten(1, 2).float(),
            q_position=places[first:],
            k=prompt.k.transpose(1, 2).flatten(0, 1).float(),
            position=position.repeat_interleave(heads, 0, output_size=every),
            candidate=~protected.repeat_interleave(heads, 0, output_size=every),
            score=prompt.score.flatten(0, 1),
        )
        votes = self.vote(tokens)
        keep = capped(tokens.candidate & (votes.votes > 0), votes.votes, votes.mass, self.head_budget)
        return keep.unflatten(0, (prompts, heads))

    def vote(self, tokens: LayerTokens, calibrated: bool = False, known: HeadCalibration | None = None) -> Votes:
        """Votes of a layer's tokens; see `siftkv.policies.hardkv.selection.vote`."""
        if self.select == "topk":
            return top_k(tokens, self.head_budget, self.ranks_by, self.group == "union")
        return vote(tokens, self.p, self.ranks_by, self.group == "union", calibrated, known)
