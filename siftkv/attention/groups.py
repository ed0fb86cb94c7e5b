"""Which prompts of a batch a policy sees together, and how they are laid out for it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.cache import KVCache
from siftkv.errors import NumericsError, OutOfPages
from siftkv.kernels.prompts import to_device
from siftkv.kernels.ranking import WorthRule
from siftkv.policies.base import PromptView, RankedPrompts, Sifted


class Sifter(Protocol):
    """What prompt attention asks about a request: which query rows to measure, and where each token goes."""

    key: Hashable
    """What sifters that behave alike have in common."""

    def rows(self, length: int) -> tuple[Tensor, Tensor] | None: ...

    def sift(self, prompt: PromptView) -> Sifted: ...

    @property
    def positional(self) -> bool: ...

    @property
    def padded(self) -> bool: ...

    @property
    def worth_rule(self) -> WorthRule | None: ...

    def sift_ranked(self, prompts: RankedPrompts) -> Sifted: ...


@dataclass
class PromptChunk:
    """One request's prompt within a flat batch: rows `[start, start + length)`.

    failure: why its keys and values could not be kept. The forward pass goes on for the others; this one must be
        released.
    """

    slot: int
    start: int
    length: int
    sifter: Sifter
    failure: OutOfPages | NumericsError | None = None


@dataclass(frozen=True)
class Padding:
    """Prompts of different lengths, padded in front to `n` tokens: int64 on the device, indices from the first's first
    token on.

    rows: `[R * n]`, the token that stands at each place (any, where none does). places: `[T']`, where each stands.
    """

    lengths: tuple[int, ...]
    rows: Tensor
    places: Tensor

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Padding:
        longest, length = max(lengths), torch.tensor(lengths)[:, None]
        token = torch.arange(longest) - (longest - length)  # [R, n]
        first = length.cumsum(0) - length
        rows, places = (first + token.clamp_min(0)).flatten(), (token >= 0).flatten().nonzero()[:, 0]
        return cls(lengths, to_device(rows, device), to_device(places, device))


@dataclass(frozen=True)
class Group:
    """Neighbours in the batch under one policy, classed together: of one length, seen as one, padded, or ranked by
    kernels.

    prompts: which of the batch. shape: how many the policy sees, and their tokens. places: as in `PromptView`. slots:
        int64 `[R]`, theirs. rule: what kernels rank them by, or None. padding: where they are padded.
    """

    prompts: range
    span: slice
    shape: tuple[int, int]
    places: Tensor | None
    sifter: Sifter
    protected: Tensor
    slots: Tensor
    rule: WorthRule | None
    padding: Padding | None = None


_MOST_PADDING = 2
"""Prompts are padded to at most so many times their length."""


def groups_of(cache: KVCache, chunks: list[PromptChunk], slots: Tensor) -> list[Group]:
    """All prompts of a batch (`slots`, int64 `[B]`), in groups of neighbours."""
    together = cache.kernels.DEFERS_FAULTS
    return [_group(cache, chunks, run, slots[run.start : run.stop]) for run in _runs(chunks, together)]


def _group(cache: KVCache, chunks: list[PromptChunk], prompts: range, slots: Tensor) -> Group:
    own = chunks[prompts.start : prompts.stop]
    first, span = own[0], slice(own[0].start, own[-1].start + own[-1].length)
    rule = first.sifter.worth_rule if cache.kernels.DEFERS_FAULTS else None
    places, padding = None, None
    if len({c.length for c in own}) == 1 or rule is not None:
        shape, protected = (len(own), first.length), cache.protected(first.slot, first.length)
    elif first.sifter.padded:
        padding = Padding.of(tuple(c.length for c in own), slots.device)
        shape = (len(own), max(padding.lengths))
        near = [F.pad(cache.protected(c.slot, c.length), (shape[1] - c.length, 0), value=True) for c in own]
        protected = torch.stack(near)
    else:
        shape, places = (1, span.stop - span.start), _counted(own, slots.device)
        protected = torch.cat([cache.protected(c.slot, c.length) for c in own])
    return Group(prompts, span, shape, places, first.sifter, protected, slots, rule, padding)


def _counted(own: list[PromptChunk], device: torch.device) -> Tensor:
    """Positions of the tokens of prompts laid end to end, int64 `[T']`."""
    return torch.cat([torch.arange(c.length, device=device) for c in own])


def _runs(chunks: list[PromptChunk], together: bool) -> list[range]:
    """Neighbours that can be classed together, or each prompt for itself."""
    runs: list[range] = []
    for i, chunk in enumerate(chunks):
        before = chunks[i - 1]
        alike = i > 0 and before.sifter.key == chunk.sifter.key
        any_length = chunk.sifter.positional or chunk.sifter.worth_rule is not None
        if alike and chunk.sifter.padded:
            longest = max(c.length for c in chunks[runs[-1].start : i + 1])
            any_length = min(c.length for c in chunks[runs[-1].start : i + 1]) * _MOST_PADDING >= longest
        if together and alike and (any_length or before.length == chunk.length):
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs
