"""Hard-KV's triggers: when a request votes, and what is done with the votes. Between decode steps, a request at a time.

A trigger is: select (votes of the last queries), fit (budgets over all layers), rewrite (survivors become contiguous),
condense (the others are dropped, or merged into survivors). It depends on the request alone, on its tokens and its
position, so that a request is sifted the same way in any batch, and again when it is computed anew.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from siftkv.cache import CacheSpec, KVCache
from siftkv.cache.compaction import HeadTokens
from siftkv.engine.beside import Pending, apply, begin, held_tokens
from siftkv.engine.binding import BoundPolicy
from siftkv.engine.together import select_together
from siftkv.engine.triggers import Trigger
from siftkv.errors import OutOfPages, PolicyError
from siftkv.kernels.state import CacheState, Selection, SelectionRule
from siftkv.policies.base import UNLIMITED
from siftkv.policies.hardkv import HardKV
from siftkv.policies.hardkv.calibration import HeadCalibration
from siftkv.policies.hardkv.condense import merge, reference_query
from siftkv.policies.hardkv.fit import Ballot, fit
from siftkv.policies.hardkv.rows import LayerTokens
from siftkv.policies.hardkv.selection import coverage, filled
from siftkv.policies.hardkv.settings import budget_bytes
from siftkv.policies.kivi import Kivi
from siftkv.policies.quest import Quest


@dataclass(frozen=True)
class _Layer:
    """What a trigger knows of one layer; `tokens` without keys. share: fp32 `[H, n]`, mean attention of all rows."""

    tokens: HeadTokens
    ballot: Ballot
    share: Tensor


class Cascade:
    """The triggers of one request: `due` says when, `run` does it, `history` is what was done.

    Triggers stand at positions `interval` apart. Where the first one stands follows from the prompt's tokens and the
    number of the completion, so that requests that run together do not all trigger in the same step.
    """

    eager: ClassVar[bool] = False
    """Whether the request's decode steps cannot be captured in a graph."""

    _pending: Pending | None = None

    def __init__(self, bound: BoundPolicy, policy: HardKV, spec: CacheSpec, prompt_ids: SequenceOf[int], index: int):
        self.policy = policy
        self.history: list[Trigger] = []
        self._tiers = bound.pool_tiers
        self._most_tokens = _most_tokens(policy, spec, self._tiers[-1])
        self._prompt_length = len(prompt_ids)
        self._stagger = zlib.crc32(array("q", prompt_ids).tobytes(), index) % policy.interval
        self._calibration: dict[int, HeadCalibration] = {}

    def due(self, seen: int) -> bool:
        """Whether the request triggers once it has seen `seen` tokens: at the end of its prompt, and every `interval`
        positions after that.
        """
        if seen <= self.policy.lower:
            return False
        return seen == self._prompt_length or (seen + self._stagger) % self.policy.interval == 0

    def moves(self, seen: int) -> bool:
        """Whether tokens may change pages before the token at position `seen` is fed: a rewrite compacts, so that it
        takes at most a page a head more than it gives back, and the step after it a page a head.
        """
        return self._pending is not None or self.due(seen)

    def settle(self, cache: KVCache, slot: int, seen: int) -> None:
        """Apply what an earlier step's trigger selected. What is left of another life, before the request was computed
        anew, is forgotten: its tokens will trigger again.
        """
        pending, self._pending = self._pending, None
        if pending is not None and pending.position < seen:
            self.history.append(apply(cache, slot, pending))

    @torch.inference_mode()
    def run(self, cache: KVCache, slot: int, seen: int) -> None:
        """Trigger now: at once, or, where the cache's kernels rewrite all layers together, so that `settle` applies
        it at the request's next step. A rewrite that finds no free page is left to the next trigger; nothing is lost.
        """
        self.history = [trigger for trigger in self.history if trigger.position < seen]
        if not self.history:  # the first of a life, also when the request is computed anew
            self._calibration.clear()
        prompt_is_selected = seen == self._prompt_length and self.policy.selects_prompt(seen)
        rewrites = seen > self.policy.upper and not prompt_is_selected
        rule = self._rule(cache)
        if rule is None:
            self.history.append(self._run_plain(cache, slot, seen, rewrites))
        else:
            near = min(seen, self.policy.sinks + self.policy.window)
            select = partial(self._select, cache.kernels, rule, seen, near)
            self._pending = begin(cache, slot, seen, near, rewrites, rule, select)

    def _rule(self, cache: KVCache) -> SelectionRule | None:
        """This policy's selection, where it can be made, and applied, for all layers at once; else None."""
        policy, kernels = self.policy, cache.kernels
        if policy.calibrate != "rank" or policy.condense != "evict" or policy.sparse_loading:
            return None
        if policy.queries != cache.state.query_rows or not hasattr(kernels, "rewrite"):
            return None
        sources = tuple(reversed(self._tiers))  # tokens of the last tier are older than those of the first
        if len(sources) > 1 and cache.spec.layouts[sources[0]].format.dense:
            return None
        return SelectionRule(policy.p, policy.metric, policy.pool, policy.group == "union", policy.head_budget, sources)

    def _select(self, kernels: Any, rule: SelectionRule, seen: int, near: int, state: CacheState) -> Selection:
        """The selection of the request in slot 0: by a kernel where one knows it."""
        policy = self.policy
        by_votes = policy.select == "votes" and policy.layout == "true"
        known = by_votes and not policy.memory and not isinstance(policy.budget, str)
        if known and kernels.selects(state, rule):
            return cast(Selection, kernels.select(state, 0, rule, longest=max(1, seen - near)))
        return select_together(state, 0, policy, rule.sources, seen, self._most_tokens)

    def _run_plain(self, cache: KVCache, slot: int, seen: int, rewrites: bool) -> Trigger:
        layers = [self._poll(cache, layer, slot) for layer in range(cache.spec.num_layers)]
        keep = fit(self.policy, [layer.ballot for layer in layers], self._most_tokens)
        done = not rewrites or self._rewrite(cache, slot, layers, keep)
        if self.policy.sparse_loading and seen <= self.policy.upper:
            for number, (layer, kept) in enumerate(zip(layers, keep, strict=True)):
                cache.skip_pages(number, slot, layer.tokens, kept | ~layer.ballot.candidate)
        near = [(x.tokens.position >= 0) & ~x.ballot.candidate for x in layers]
        return Trigger(
            seen,
            rewrites,
            done,
            torch.stack([(a | b).sum(-1) for a, b in zip(keep, near, strict=True)]),
            held_tokens(cache, slot),
            torch.stack([coverage(x.share, a | b) for x, a, b in zip(layers, keep, near, strict=True)]),
            self._calibrations(),
        )

    def _poll(self, cache: KVCache, layer: int, slot: int) -> _Layer:
        """Let the last queries of one layer vote, and write the votes beside the tokens."""
        q, position = self._queries(cache, layer, slot)
        tokens = cache.tokens(layer, slot)
        candidate = tokens.tier >= 0
        view = LayerTokens(q, position, tokens.k, tokens.position, candidate, tokens.weight, tokens.score)
        found = self.policy.vote(view, self.policy.calibrate == "temperature", self._calibration.get(layer))
        if found.calibration is not None:
            self._calibration[layer] = found.calibration
        total = tokens.votes + found.votes
        cache.write_votes(layer, slot, tokens, total)
        ballot = Ballot(candidate, found.votes, total, found.mass)
        return _Layer(replace(tokens, k=tokens.k[:, :0]), ballot, found.share)

    def _queries(self, cache: KVCache, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """As many as the policy asks for of the ring, which may be longer."""
        q, position = cache.queries(layer, slot)
        first = max(0, len(q) - self.policy.queries)
        return q[first:], position[first:]

    def _rewrite(self, cache: KVCache, slot: int, layers: list[_Layer], keep: list[Tensor]) -> bool:
        """Take away what does not stay. False where pages ran out: later layers are as they were."""
        target = self._tiers[-1]
        for number, (layer, kept) in enumerate(zip(layers, keep, strict=True)):
            gone = layer.ballot.candidate & ~kept
            merged = None
            if self.policy.condense == "merge" and bool(gone.any()):
                merged = self._merge(cache, number, slot, layer.ballot, kept, gone)
            elif bool((~gone & (~layer.ballot.candidate | (layer.tokens.tier == target))).all()):
                if self.policy.sparse_loading:  # pages without votes until now hold tokens that stay
                    cache.skip_pages(number, slot, layer.tokens, torch.ones_like(kept))
                continue  # every token stays where it is
            try:
                cache.rewrite(number, slot, layer.tokens, kept, target, merged)
            except OutOfPages:
                return False
        return True

    def _merge(
        self, cache: KVCache, layer: int, slot: int, ballot: Ballot, keep: Tensor, gone: Tensor
    ) -> dict[str, Tensor]:
        """New contents of the tokens that stay. A head without any keeps its best one (in `keep`) to merge into."""
        if self.policy.head_budget > 0:
            lone = filled(gone, ballot.total, ballot.mass, (~keep.any(-1)).long())
            keep |= lone
            gone &= ~lone
        tokens = cache.tokens(layer, slot, values=True)
        assert tokens.v is not None
        q, _ = self._queries(cache, layer, slot)
        reference = reference_query(q, len(keep))
        found = merge(tokens.k, tokens.v, tokens.weight, reference, keep, gone)
        return {"k": found.k, "v": found.v, "weight": found.weight, "score": tokens.score, "changed": found.changed}

    def _calibrations(self) -> HeadCalibration | None:
        if not self._calibration:
            return None
        layers = [self._calibration[number] for number in sorted(self._calibration)]
        return HeadCalibration(*(torch.stack([getattr(x, n) for x in layers]) for n in _CALIBRATED))


_CALIBRATED = ("temperature", "error", "drift")


def _most_tokens(policy: HardKV, spec: CacheSpec, tier: int) -> int:
    """Tokens of all heads whose pages surely fit a budget in bytes, a part page a head included.

    Raises PolicyError for a budget that holds less than a page a head.
    """
    if not isinstance(policy.budget, str):
        return UNLIMITED
    a_page = spec.layouts[tier].tokens
    pages = budget_bytes(policy.budget) // spec.page_bytes
    if pages < spec.head_slots:
        least = spec.head_slots * spec.page_bytes
        raise PolicyError(f"budget={policy.budget} holds less than a page for each head: use {least}B or more")
    lone = spec.head_slots if policy.condense == "merge" else 0  # a head without votes keeps one token to merge into
    return pages * a_page - spec.head_slots * (a_page - 1) - lone


def cascade_of(bound: BoundPolicy, spec: CacheSpec, prompt_ids: SequenceOf[int], index: int = 0) -> Cascade | None:
    """The triggers of a request, or None where its policy has none.

    prompt_ids: int. index: which completion of the prompt. Raises PolicyError when the policy's budget does not fit the
    pool.
    """
    if isinstance(bound.policy, Quest):
        from siftkv.engine.page_reader import PageReader  # is a Cascade

        return PageReader(bound, bound.policy)
    if isinstance(bound.policy, Kivi):
        from siftkv.engine.regrouping import Regrouping  # is a Cascade

        return Regrouping(bound, bound.policy)
    if not isinstance(bound.policy, HardKV):
        return None
    return Cascade(bound, bound.policy, spec, prompt_ids, index)


def run_due(cache: KVCache, requests: Iterable[tuple[Cascade | None, int, int]]) -> None:
    """`trigger` of several requests: (triggers, slot, tokens seen) each."""
    for cascade, slot, seen in requests:
        trigger(cache, cascade, slot, seen)


def trigger(cache: KVCache, cascade: Cascade | None, slot: int, seen: int) -> None:
    """Apply the trigger of the step before a request's next one, and run the one that is due before its next token is
    fed. An error leaves the request half changed: then it can only be given up (`siftkv.cache.recovery.discard`).
    """
    if cascade is None:
        return
    cascade.settle(cache, slot, seen)
    if cascade.due(seen):
        cascade.run(cache, slot, seen)
