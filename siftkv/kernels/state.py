"""The tensors that a cache is made of, and the tensors that describe a batch: what kernels read and write.

Plain data, no behaviour. `siftkv.cache` owns a `CacheState`; every kernel body (reference, numba, ...) takes it as its
first argument.

Legend: S request slots, L layers, H kv heads, T tiers, R window rows, D head_dim, B requests in a batch, G query heads
a kv head. A *head slot* is one (slot, layer, kv head). Tiers are ordered from most to least precise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from siftkv.formats import PageLayout

UNLIMITED = 2**31 - 1
"""A cap that never binds, and a horizon that nothing outlives."""


@dataclass
class Conditioning:
    """What makes keys easy to quantise: `k' = (k - RoPE_p(b_r)) @ rotation`, undone exactly inside attention.

    rotation: `[D, D]` fp32, orthogonal (a signed block Hadamard transform); the identity where rotation is off.
    cos, sin: `[max_len, D/2]` fp32 rotary tables, indexed by position.
    bias: `[L, H, D]` fp32, the key bias restricted to each head's largest rotary pairs; zero elsewhere.
    pairs: `[L, H, P]` int32, the rotary pairs (i, i + D/2) that `bias` keeps; rank: `[L, H]` int32, how many of them
        count.
    has_bias: whether any rank is above 0.
    rates: `[D/2]` fp64, radians a position of each pair, where the tables' rows are multiples of one turn, so that
        angles may be added; None where they are not (dynamic NTK), or where nothing was removed.
    """

    rotation: Tensor
    cos: Tensor
    sin: Tensor
    bias: Tensor
    pairs: Tensor
    rank: Tensor
    has_bias: bool
    rotates: bool
    rates: Tensor | None = None


@dataclass
class CacheState:
    """All tensors of one KV cache.

    layouts: one `PageLayout` a tier.
    pages: `[num_pages, page_bytes]` uint8.
    free_ring: `[num_pages]` int32, page ids; `counters`: `[2]` int64, (taken, returned), which only grow. Entry `i %
        num_pages` of the ring for `taken <= i < returned` is a free page, so full and empty differ.
    page_table: `[S, L, H, ceil(T/2), width]` int32, -1 where empty: tier `t` stands in row `t // 2`, from the left when
        `t` is even and from the right when it is odd.
    lengths: `[S, L, H, T]` int32, tokens a tier. Pages held are exactly `ceil(length / tokens a page)`.
    window_k, window_v: `[S, L, H, sink_rows + R, D]` in the model's dtype: the first tokens, then a ring of the most
        recent ones. A token at position `p` stands in row `p` when `p < sinks[slot]`, else in row `sink_rows + p % R`.
    window_score: `[S, L, H, sink_rows + R]` fp32, mean attention of the tokens in the window.
    seen: `[S]` int64, tokens so far; window_start: `[S]` int64, the position of the oldest token in the ring (at least
        `sinks`).
    sinks, window: `[S]` int64, how many first tokens and how many recent ones the request keeps in the window.
    refresh: `[S]` int64, scores are refreshed at positions that are multiples of it; 0 = never.
    catch_up: `[S]` int64, how many stale tokens of each head slot may be examined in a step besides the one that leaves
        the window.
    not_finite: `[S]` bool, whether NaN or infinity was met in a key or value: in the prompt (only kernels that defer
        faults set it then), or in a decode step.
    peak_pages: `[S]` int64, the most pages that the request held at the end of any step.
    queries: `[S, L, W, Hq, D]` in the model's dtype, the queries (after RoPE) of the last W tokens: that of position
        `p` in row `p % W`; W is 0 where nothing reads them.
    page_skip: uint8 in the shape of `page_table`, 1 where attention ignores a page; of width 0 in a cache that skips
        none. 0 wherever no page stands.
    scratch: what a kernel body derives once from these tensors (views, work space); never part of the cache's content.
    padding_slot: the slot of a captured batch's empty rows, -1 = none. It may stand in a batch several times; decode
        steps neither advance it nor keep any of its tokens.
    alpha, cap_share: `[S, L, H, T]` fp32, cap: `[S, L, H, T]` int32 and horizon: `[S]` int64: the decode rule, see
        `siftkv.policies.base.DecodeRule`. cap_share is infinity where a cap does not grow with its request.
    """

    layouts: tuple[PageLayout, ...]
    sink_rows: int
    pages: Tensor
    free_ring: Tensor
    counters: Tensor
    page_table: Tensor
    lengths: Tensor
    window_k: Tensor
    window_v: Tensor
    window_score: Tensor
    seen: Tensor
    window_start: Tensor
    sinks: Tensor
    window: Tensor
    refresh: Tensor
    catch_up: Tensor
    alpha: Tensor
    cap: Tensor
    cap_share: Tensor
    horizon: Tensor
    not_finite: Tensor
    peak_pages: Tensor
    queries: Tensor
    page_skip: Tensor
    conditioning: Conditioning
    scratch: dict[str, Any] = field(default_factory=dict)
    padding_slot: int = -1

    @property
    def ring_rows(self) -> int:
        """Rows of the window's ring: the longest window plus slack."""
        return self.window_k.shape[3] - self.sink_rows

    @property
    def width(self) -> int:
        """Entries of one row of the page table."""
        return self.page_table.shape[4]

    @property
    def query_rows(self) -> int:
        """Rows of the ring of queries."""
        return self.queries.shape[2]

    @property
    def skips(self) -> bool:
        """Whether pages can be skipped."""
        return self.page_skip.shape[-1] > 0

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    def free_pages(self) -> int:
        """Pages that can be taken now."""
        taken, returned = self.counters.tolist()
        return int(returned - taken)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that takes memory, by name; what physical accounting adds up."""
        own = {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}
        shared = {f"conditioning.{k}": v for k, v in vars(self.conditioning).items() if isinstance(v, Tensor)}
        return own | shared


SLOT_TENSORS = (
    "page_table",
    "lengths",
    "window_k",
    "window_v",
    "window_score",
    "seen",
    "window_start",
    "sinks",
    "window",
    "refresh",
    "catch_up",
    "alpha",
    "cap",
    "cap_share",
    "horizon",
    "not_finite",
    "peak_pages",
    "queries",
    "page_skip",
)
"""Tensors of `CacheState` whose first dimension is the request slot."""

SELECTION_TENSORS = (
    "page_table",
    "lengths",
    "window_k",
    "window_score",
    "seen",
    "window_start",
    "sinks",
    "queries",
)
"""Those that a selection reads. Beside them it reads and writes pages."""


@dataclass(frozen=True)
class SelectionRule:
    """Which tokens of a request earn their place, from the queries of its ring.

    p: attention mass to keep a query and query head, in (0, 1]. metric: "attention", "snapkv" or "accumulated", what
        tokens are ranked by. pool: width of the maximum over stored positions in "snapkv", odd. union: every query head
        of a group votes, else the maximum over the group's probabilities does.
    budget: the most tokens that a head keeps beside sinks and window. sources: tiers of the pool whose tokens are
        candidates, in order of time.
    """

    p: float
    metric: str
    pool: int
    union: bool
    budget: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Selection:
    """What a selection found, for all layers and heads of one request.

    keep: uint8 `[L, H, longest]`, per candidate in order of (source tier, index in tier). kept: int32 `[L, H]`.
    mass: fp32 `[L, H]`, the share of attention mass that kept tokens, sinks and window hold.
    """

    keep: Tensor
    kept: Tensor
    mass: Tensor


def table_column(width: int, tier: int, index: Tensor) -> Tensor:
    """Column of the `index`-th page of a tier in its row of the page table: from the left for even tiers, from the
    right for odd ones.
    """
    return index if tier % 2 == 0 else width - 1 - index


def window_row(state: CacheState, position: Tensor, sinks: Tensor) -> Tensor:
    """Window row of a token: its position among the sinks, else its place in the ring."""
    return torch.where(position < sinks, position, state.sink_rows + position % state.ring_rows)
