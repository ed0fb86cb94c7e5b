"""Kernels with a `select` and a `rewrite` over all layers at once, as the GPU has them, put together from the generic
operations; and lanes that finish a selection as early or as late as they may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from siftkv.cache import compaction
from siftkv.engine.beside import Job
from siftkv.errors import OutOfPages
from siftkv.kernels import reference
from siftkv.kernels.state import SELECTION_TENSORS, CacheState, Selection, SelectionRule
from siftkv.policies.hardkv.metrics import METRICS
from siftkv.policies.hardkv.rows import LayerTokens
from siftkv.policies.hardkv.selection import capped, coverage, vote


class LayerwiseKernels:
    """The reference bodies, and Hard-KV's operations of the GPU in terms of `siftkv.cache.compaction`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def selects(self, state: CacheState, rule: SelectionRule) -> bool:
        return True

    def snapshot(self, state: CacheState, slot: int) -> CacheState:
        own = {name: getattr(state, name)[slot : slot + 1].clone() for name in SELECTION_TENSORS}
        return replace(state, **own)

    def select(self, state: CacheState, slot: int, rule: SelectionRule, longest: int | None = None) -> Selection:
        assert longest is not None
        layers, heads = state.lengths.shape[1:3]
        keep = torch.zeros(layers, heads, longest, dtype=torch.uint8)
        mass = torch.zeros(layers, heads)
        for layer in range(layers):
            tokens = compaction.head_tokens(state, layer, slot)
            q, position = compaction.recent_queries(state, layer, slot)
            candidate = tokens.tier >= 0
            view = LayerTokens(q, position, tokens.k, tokens.position, candidate, tokens.weight, tokens.score)
            found = vote(view, rule.p, METRICS[rule.metric](rule.pool), rule.union)
            total = tokens.votes + found.votes
            score = None if rule.metric == "accumulated" else found.mass
            compaction.write_votes(state, layer, slot, tokens, total, score)
            kept = capped(candidate & (found.votes > 0), total, found.mass, rule.budget)
            head, column = candidate.nonzero(as_tuple=True)
            keep[layer, head, _places(candidate)[head, column]] = kept[head, column].to(torch.uint8)
            mass[layer] = coverage(found.share, kept | (tokens.tier == compaction.IN_WINDOW))
        return Selection(keep, keep.sum(-1, dtype=torch.int32), mass)

    def rewrite(
        self, state: CacheState, slot: int, keep: Tensor, target: int, sources: tuple[int, ...], tokens_at: Tensor
    ) -> Tensor:
        for layer in range(len(keep)):
            tokens = compaction.head_tokens(state, layer, slot)
            candidate = tokens.tier >= 0
            place = _places(candidate).clamp(0, keep.shape[2] - 1)
            came_later = tokens.index >= tokens_at[layer].gather(-1, tokens.tier.long().clamp_min(0))
            stays = candidate & (came_later | (keep[layer].gather(-1, place) > 0))
            try:
                compaction.rewrite(state, layer, slot, tokens, stays, target)
            except OutOfPages:
                return torch.tensor([False])
        return torch.tensor([True])


def _places(candidate: Tensor) -> Tensor:
    return candidate.cumsum(-1) - 1


@dataclass
class _Work:
    work: Callable[[], Selection] | None
    found: Selection | None = None

    def join(self) -> Selection:
        if self.work is not None:
            self.found, self.work = self.work(), None
        assert self.found is not None
        return self.found


@dataclass
class FakeLane:
    """late: selections run when they are joined, after everything that was allowed to overtake them; else at once."""

    late: bool
    jobs: list[_Work] = field(default_factory=list)

    def start(self, work: Callable[[], Selection], reads: Iterable[Tensor]) -> Job:
        self.jobs.append(job := _Work(work))
        if not self.late:
            job.join()
        return job

    @property
    def open(self) -> int:
        """Selections that nobody has joined."""
        return sum(job.work is not None for job in self.jobs)
