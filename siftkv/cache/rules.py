"""How a request's tokens live in the cache, whatever policy says so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.cache.spec import CacheSpec
from siftkv.errors import RequestError
from siftkv.kernels.state import UNLIMITED, CacheState


@dataclass(frozen=True)
class SlotRule:
    """How a request's tokens live in the cache: `siftkv.policies.base.DecodeRule` spread over the pool's tiers.

    alpha fp32, cap int64, share fp32 `[L, H, T]` over the pool's tiers (cap 0 where the request does not use a tier).
    """

    window: int
    sinks: int
    alpha: Tensor
    cap: Tensor
    refresh: int = 0
    catch_up: int = 0
    share: Tensor | None = None
    horizon: int = UNLIMITED

    def check(self, spec: CacheSpec) -> None:
        """Raise RequestError when the rule does not fit a cache."""
        if self.window > spec.max_window:
            raise RequestError(
                f"window={self.window} is above this cache's {spec.max_window}: open it with a larger max_window"
            )
        if self.sinks > spec.sink_rows:
            raise RequestError(
                f"sinks={self.sinks} is above this cache's {spec.sink_rows}: open it with more sink_rows"
            )
        if self.catch_up not in (0, 1):
            raise RequestError(
                f"catch_up={self.catch_up}: a step examines at most one stale token a head slot, use 0 or 1"
            )
        if not 1 <= self.horizon <= UNLIMITED:
            raise RequestError(
                f"horizon={self.horizon}: a score is a mean over 1 to {UNLIMITED} queries, use a number in between"
            )

    def write(self, state: CacheState, slot: int) -> None:
        """Let a slot live by this rule."""
        state.window[slot], state.sinks[slot] = self.window, self.sinks
        state.refresh[slot], state.catch_up[slot] = self.refresh, self.catch_up
        state.alpha[slot], state.cap[slot] = self.alpha.to(state.alpha), self.cap.to(state.cap)
        state.cap_share[slot] = torch.inf if self.share is None else self.share.to(state.cap_share)
        state.horizon[slot] = self.horizon
