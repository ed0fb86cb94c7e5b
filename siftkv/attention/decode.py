"""Decode attention: one new token a request, over everything that its heads keep."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from siftkv.cache import KVCache


class PageChooser(Protocol):
    """What tells attention, layer by layer and query by query, which pages of a request to skip."""

    def choose(self, cache: KVCache, layer: int, slot: int, query: Tensor) -> None:
        """Called before the attention of one layer; query: `[Hq, D]` after RoPE, of the token that is fed."""


_CHOOSERS: WeakKeyDictionary[KVCache, dict[int, PageChooser]] = WeakKeyDictionary()


def choosers(cache: KVCache) -> dict[int, PageChooser]:
    """Who chooses pages in the next decode step over `cache`, by slot. Only a step that runs eagerly asks them; whoever
    wants to be asked again has to say so before every step.
    """
    return _CHOOSERS.setdefault(cache, {})


class DecodeAttention:
    """The `attend` callback of a decode pass over the requests in `slots` (int64 `[B]`): `(layer, q [B, Hq, D], k, v
    [B, H, D]) -> [B, Hq, D]`.
    """

    def __init__(self, cache: KVCache, slots: Tensor) -> None:
        self.cache = cache
        self.slots = slots
        waiting = _CHOOSERS.pop(cache, {})
        here = enumerate(slots.tolist()) if waiting else ()
        self._choosers = [(row, slot, waiting[slot]) for row, slot in here if slot in waiting]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for row, slot, chooser in self._choosers:
            chooser.choose(self.cache, layer, slot, q[row])
        return self.cache.attend(layer, self.slots, q, k, v)
