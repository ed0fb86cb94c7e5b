"""When tokens of a request under `kivi` have gathered to a group, and what then becomes of them."""

from __future__ import annotations

import torch

from siftkv.cache import KVCache
from siftkv.cache.regroup import move_oldest
from siftkv.engine.binding import BoundPolicy
from siftkv.engine.cascade import Cascade
from siftkv.engine.triggers import Trigger
from siftkv.errors import OutOfPages
from siftkv.policies.kivi import Kivi


class Regrouping(Cascade):
    """The triggers of a request whose tokens are quantised a group at a time, between two decode steps."""

    def __init__(self, bound: BoundPolicy, policy: Kivi) -> None:
        self.kivi = policy
        self.history: list[Trigger] = []
        self._source, self._target = bound.pool_tiers

    def settle(self, cache: KVCache, slot: int, seen: int) -> None:
        """Nothing is ever selected ahead."""

    def due(self, seen: int) -> bool:
        """Where a group has left the window."""
        gone = seen - self.kivi.window - self.kivi.sinks
        return gone > 0 and gone % self.kivi.moves == 0

    @torch.inference_mode()
    def run(self, cache: KVCache, slot: int, seen: int) -> None:
        """Move all whole groups. Where pages are short they wait for the next time; nothing is lost."""
        waiting = int(cache.state.lengths[slot, 0, 0, self._source])  # all heads keep the same tokens
        count = waiting // self.kivi.moves * self.kivi.moves
        if not count:
            return
        try:
            move_oldest(cache.state, slot, self._source, self._target, count)
        except OutOfPages:
            return
