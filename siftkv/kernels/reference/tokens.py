"""Reading and writing single tokens in pages by their addresses: every other reference kernel stands on these."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from siftkv.formats import PageLayout
from siftkv.kernels.state import CacheState, table_column


def page_of(state: CacheState, table: Tensor, tier: int, slot_in_tier: Tensor) -> Tensor:
    """Page ids (int64) of tokens: `table` `[..., ceil(T/2), width]`, `slot_in_tier` `[..., n]` int64, -1 where no page
    stands.
    """
    column = table_column(state.width, tier, slot_in_tier // state.layouts[tier].tokens)
    return table[..., tier // 2, :].gather(-1, column.clamp(0, state.width - 1)).long()


@lru_cache(maxsize=64)
def _record(layout: PageLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """`layout.record` on a device, moved there once: the host waits for every copy to it."""
    base, stride = layout.record
    return base.to(device), stride.to(device)


def _addresses(state: CacheState, tier: int, page: Tensor, slot_in_tier: Tensor) -> Tensor:
    layout = state.layouts[tier]
    base, stride = _record(layout, page.device)
    token = (slot_in_tier % layout.tokens)[..., None]
    return page[..., None] * layout.page_bytes + base + stride * token


def read_records(state: CacheState, tier: int, page: Tensor, slot_in_tier: Tensor) -> Tensor:
    """Records uint8 `[..., token_bytes]` of tokens `[...]`; where `page` is -1 whatever stands in page 0."""
    return state.pages.view(-1)[_addresses(state, tier, page.clamp_min(0), slot_in_tier)]


def write_records(state: CacheState, tier: int, page: Tensor, slot_in_tier: Tensor, record: Tensor) -> None:
    """Write records `[n, token_bytes]` of tokens `[n]`."""
    state.pages.view(-1)[_addresses(state, tier, page, slot_in_tier)] = record


def state_addresses(state: CacheState, tier: int, page: Tensor, slot_in_tier: Tensor) -> tuple[Tensor, Tensor]:
    """Where scores (2-byte units) and positions (4-byte units) of tokens stand in the flat pool, int64 `[...]`."""
    layout = state.layouts[tier]
    start = page.clamp_min(0) * layout.page_bytes
    token = slot_in_tier % layout.tokens
    return (start + layout.offsets[4]) // 2 + token, (start + layout.offsets[5]) // 4 + token


def vote_addresses(state: CacheState, tier: int, page: Tensor, slot_in_tier: Tensor) -> Tensor:
    """Where votes of tokens stand in the flat pool of 2-byte units, int64 `[...]`."""
    layout = state.layouts[tier]
    return (page.clamp_min(0) * layout.page_bytes + layout.offsets[6]) // 2 + slot_in_tier % layout.tokens


def weight_addresses(state: CacheState, tier: int, page: Tensor, slot_in_tier: Tensor) -> Tensor:
    """Where log-weights of tokens stand in the flat pool of 4-byte units, int64 `[...]`."""
    layout = state.layouts[tier]
    return (page.clamp_min(0) * layout.page_bytes + layout.offsets[7]) // 4 + slot_in_tier % layout.tokens


def pool_as(state: CacheState, dtype: torch.dtype) -> Tensor:
    """The whole pool as a flat tensor of a wider type (a view)."""
    return state.pages.view(-1).view(dtype)


def is_plain(layout: PageLayout) -> bool:
    """Whether a tier stores keys as the model made them; most quantised tiers store conditioned keys."""
    return layout.format.plain
