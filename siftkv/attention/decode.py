"""Decode attention: one new token a request, over everything that its heads keep."""

from __future__ import annotations

from torch import Tensor

from siftkv.cache import KVCache


class DecodeAttention:
    """The `attend` callback of a decode pass over the requests in `slots` (int64 `[B]`): `(layer, q [B, Hq, D], k, v
    [B, H, D]) -> [B, Hq, D]`.
    """

    def __init__(self, cache: KVCache, slots: Tensor) -> None:
        self.cache = cache
        self.slots = slots

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.cache.attend(layer, self.slots, q, k, v)
