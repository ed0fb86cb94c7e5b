"""Quest's choice of pages, in every decode step of a request."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from siftkv.attention.decode import choosers
from siftkv.cache import KVCache
from siftkv.cache.compaction import HeadTokens
from siftkv.engine.binding import BoundPolicy
from siftkv.engine.cascade import Cascade
from siftkv.engine.triggers import Trigger
from siftkv.policies.quest import Quest


class PageReader(Cascade):
    """The triggers of a request under `quest`: before every step it asks to be heard, and in the step it tells
    attention, layer by layer, which full pages the query does not need.

    Every channel's extremes over each page are kept for all layers, fp32 `[L, H, P, D]` twice, beside the cache, and
    taken anew from the stored keys when a page has been filled.
    """

    eager: ClassVar[bool] = True

    def __init__(self, bound: BoundPolicy, policy: Quest) -> None:
        self.quest = policy
        self.history: list[Trigger] = []
        [self._tier] = bound.pool_tiers
        self._full = self._seen = -1
        self._count = 0

    def due(self, seen: int) -> bool:
        """Before every step."""
        return True

    def moves(self, seen: int) -> bool:
        """Pages are chosen, never changed."""
        return False

    @torch.inference_mode()
    def run(self, cache: KVCache, slot: int, seen: int) -> None:
        """Make ready for the step that feeds the token at position `seen`."""
        a_page = cache.spec.layouts[self._tier].tokens
        full = int(cache.state.lengths[slot, 0, 0, self._tier]) // a_page  # all heads keep the same tokens
        if full != self._full or seen <= self._seen:
            self._summarise(cache, slot, full, a_page)
        self._full, self._seen = full, seen
        self._count = self.quest.pages(seen, a_page)
        choosers(cache)[slot] = self

    def choose(self, cache: KVCache, layer: int, slot: int, query: Tensor) -> None:
        """Skip the pages of one layer that are not among the best for `query` `[Hq, D]`."""
        if layer >= self.quest.dense_layers:
            chosen = self.quest.chosen(query.float(), self._least[layer], self._most[layer], self._count)
            cache.skip_pages(layer, slot, self._pages, chosen)

    def _summarise(self, cache: KVCache, slot: int, full: int, a_page: int) -> None:
        least, most = [], []
        for layer in range(cache.spec.num_layers):
            tokens = cache.tokens(layer, slot)
            keys = tokens.k[tokens.tier == self._tier].unflatten(0, (cache.spec.num_kv_heads, -1))
            paged = keys[:, : full * a_page].unflatten(1, (full, a_page))
            least.append(paged.amin(2))
            most.append(paged.amax(2))
        self._least, self._most = torch.stack(least), torch.stack(most)
        self._pages = _one_a_page(cache.spec.num_kv_heads, full, a_page, self._tier, self._least.device)


def _one_a_page(heads: int, pages: int, a_page: int, tier: int, device: torch.device) -> HeadTokens:
    """The first token of each full page, to stand for its page where pages are skipped."""
    index = (torch.arange(pages, device=device) * a_page).expand(heads, pages)
    nothing = torch.zeros(heads, pages, device=device)
    tiers = torch.full((heads, pages), tier, dtype=torch.int8, device=device)
    return HeadTokens(nothing[..., None], None, index, tiers, index, nothing, nothing.int(), nothing)
