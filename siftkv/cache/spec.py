"""The size and shape of a cache, fixed when it is opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from siftkv.cache.page_size import choose_page_bytes
from siftkv.errors import FormatError
from siftkv.formats import DENSE_DTYPES, PageLayout, Tier, TierFormat

RING_SLACK = 8
"""Ring rows beyond the longest window: the new token, and a few that may wait when pages are short."""

MAX_TIERS = 4

TIER_STATE = ("scores", "positions", "votes", "weights")
"""Per-token state that a tier may keep: the flags of `Tier`."""


@dataclass(frozen=True)
class CacheSpec:
    """What a cache is built from.

    num_layers, num_kv_heads, head_dim: of this rank's part of the model. dtype: of the window and the dense tier.
    tiers: at most four, most precise first. page_bytes: 0 = chosen for the tiers. num_pages: of the pool. max_slots:
        requests resident at a time.
    query_rows: recent queries kept a layer (0 = none); num_heads: query heads, read only with those. skips: whether
        attention can be told to ignore single pages.
    padding_slots: slots beyond those, for the empty rows of a captured batch. max_len: longest context in tokens.
        max_window, sink_rows: room in the window for each request.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tiers: tuple[Tier, ...]
    num_pages: int
    max_slots: int
    max_len: int
    max_window: int = 64
    sink_rows: int = 4
    page_bytes: int = 0
    padding_slots: int = 0
    query_rows: int = 0
    num_heads: int = 0
    skips: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.tiers) <= MAX_TIERS:
            raise FormatError(f"a pool holds 1 to {MAX_TIERS} formats, not {len(self.tiers)}")
        if not self.page_bytes:
            object.__setattr__(self, "page_bytes", choose_page_bytes(self.tiers, self.head_dim))

    @cached_property
    def layouts(self) -> tuple[PageLayout, ...]:
        return tuple(PageLayout(tier, self.head_dim, self.page_bytes) for tier in self.tiers)

    @property
    def all_slots(self) -> int:
        """Slots that tables and windows are made for."""
        return self.max_slots + self.padding_slots

    @property
    def ring_rows(self) -> int:
        return self.max_window + RING_SLACK

    @property
    def table_width(self) -> int:
        """Page-table entries that a row needs: the longest context in the tier of the row with the fewest tokens a
        page, and a part page each.
        """
        return -(-self.max_len // min(layout.tokens for layout in self.layouts)) + 2

    @property
    def head_slots(self) -> int:
        """Head slots of one request."""
        return self.num_layers * self.num_kv_heads

    @property
    def slot_bytes(self) -> int:
        """Bytes of one request slot beside its pages: its window and its rows of every table."""
        tiers, heads = len(self.tiers), self.head_slots
        rows = self.sink_rows + self.ring_rows
        a_head = 4 * -(-tiers // 2) * self.table_width + 4 * tiers  # page table, lengths
        a_head += 2 * rows * self.head_dim * self.dtype.itemsize + 4 * rows  # window keys, values, scores
        a_head += (4 + 4 + 4) * tiers  # thresholds, caps and shares
        a_head += -(-tiers // 2) * self.table_width * self.skips  # skipped pages
        queries = self.num_layers * self.query_rows * self.num_heads * self.head_dim * self.dtype.itemsize
        a_request = 8 * 8 + 1  # seen, window_start, sinks, window, refresh, catch_up, horizon, peak_pages; not_finite
        return a_head * heads + queries + a_request

    def tier_index(self, wanted: Tier) -> int:
        """Index of the tier with the format and the state of `wanted`. Raises FormatError that names what there is."""
        for index, tier in enumerate(self.tiers):
            if tier.format == wanted.format:
                if lacking := [name for name in TIER_STATE if getattr(tier, name) < getattr(wanted, name)]:
                    # Declared dense formats keep no state beside keys and values, and none keep votes.
                    hopeless = wanted.format.dense or {"votes", "weights"} & set(lacking)
                    declared = "" if hopeless else f"with formats that include {wanted.name}, or "
                    raise FormatError(
                        f"this pool keeps no {lacking[0]} beside {wanted.name}, which this policy reads: "
                        f"open it {declared}with that policy as its default"
                    )
                return index
        names = ", ".join(t.name for t in self.tiers)
        raise FormatError(
            f"format {wanted.name} is not one of this pool's ({names}): open it with formats that include {wanted.name}"
        )

    def bf16_bytes(self, tokens: int) -> int:
        """Bytes that `tokens` tokens of one request take in a plain 16-bit cache of this model."""
        return tokens * self.head_slots * self.head_dim * 2 * 2


def dense_name(dtype: torch.dtype) -> str:
    """Name of the dense format of a model's dtype."""
    return next(name for name, d in DENSE_DTYPES.items() if d == dtype)


def merge_tiers(needed: Iterable[Tier], positions: bool = False) -> tuple[Tier, ...]:
    """One tier a format, with the state that any user of it needs, most precise first.

    positions: whether quantised tiers store positions in any case (models whose key bias is added back by position).
    """
    merged: dict[TierFormat, Tier] = {}
    for tier in needed:
        known = merged.get(tier.format, tier)
        either = {name: getattr(known, name) or getattr(tier, name) for name in TIER_STATE}
        either["positions"] |= positions and not tier.format.dense
        merged[tier.format] = replace(known, **either)
    return tuple(sorted(merged.values(), key=lambda t: t.format.precision, reverse=True))
