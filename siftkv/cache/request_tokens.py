"""Reading what many heads of a request keep at once, of all its layers, without a look from the host.

`siftkv.cache.compaction` asks the device how long a layer's heads are before it reads them. Here the caller knows how
many tokens a head can have, so that a stream may be given all of the work in advance. Plain PyTorch, on any device.
Heads are counted through: head `h` of layer `l` is `l * H + h`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.cache.compaction import IN_WINDOW, PADDING, HeadTokens
from siftkv.kernels.reference.attention import window_positions
from siftkv.kernels.reference.condition import plain_keys
from siftkv.kernels.reference.quantize import MOST_VOTES, decode, votes_and_weights
from siftkv.kernels.reference.tokens import is_plain, page_of, pool_as, read_records, vote_addresses
from siftkv.kernels.state import CacheState


def request_tokens(state: CacheState, slot: int, heads: slice, sources: tuple[int, ...], most: int) -> HeadTokens:
    """Tokens of some heads of a request in time order, as `siftkv.cache.compaction.head_tokens` reads a layer's, but
    padded to `most` tokens and the rows of a window: every field is `[h, window rows + most]`, padding last; no values.

    sources: the tiers that hold tokens, those of the oldest first; all store positions. most: tokens outside the window
    that a head can have.
    """
    window, stored = _window(state, slot, heads), _stored(state, slot, heads, sources, most)
    k, position, tier, index, score, votes, weight = (torch.cat(x, 1) for x in zip(window, stored, strict=True))
    absent = tier == PADDING
    order = position.masked_fill(absent, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
    absent = absent.gather(1, order)
    # What no token owns may be anything, NaN too.
    k = k.gather(1, order[..., None].expand_as(k)).masked_fill_(absent[..., None], 0.0)
    position, tier, index, score, votes, weight = (
        x.gather(1, order) for x in (position, tier, index, score, votes, weight)
    )
    score, votes, weight = (x.masked_fill_(absent, 0) for x in (score, votes, weight))
    return HeadTokens(k, None, position, tier, index, score, votes, weight)


def _window(state: CacheState, slot: int, heads: slice) -> tuple[Tensor, ...]:
    """Sinks and recent tokens: the fields of `HeadTokens` without values."""
    slots = torch.full((1,), slot, device=state.seen.device)
    position, valid = window_positions(state, slots, state.seen[slot : slot + 1] - 1)
    score = state.window_score[slot].flatten(0, 1)[heads]
    shape = score.shape
    tier = torch.where(valid, IN_WINDOW, PADDING).to(torch.int8).expand(shape)
    row = torch.arange(shape[1], device=score.device).expand(shape)
    votes = torch.zeros(shape, dtype=torch.int32, device=score.device)
    k = state.window_k[slot].flatten(0, 1)[heads].float()
    return k, torch.where(valid, position, -1).expand(shape), tier, row, score, votes, torch.zeros_like(score)


def _stored(state: CacheState, slot: int, heads: slice, sources: tuple[int, ...], most: int) -> tuple[Tensor, ...]:
    """Tokens in pages, one source after another: the fields of `HeadTokens` without values, `[h, most]`."""
    length = state.lengths[slot].flatten(0, 1)[heads].long()  # [h, T]
    column = torch.arange(most, device=length.device)
    before = torch.zeros_like(length[:, :1])
    found: tuple[Tensor, ...] | None = None
    for tier in sources:
        index = column - before
        own = (index >= 0) & (index < length[:, tier, None])
        here = _read(state, slot, heads, tier, index.clamp_min(0), own)
        if found is None:
            found = here
        else:
            found = tuple(
                torch.where(own[..., None] if new.ndim == 3 else own, new, old)
                for new, old in zip(here, found, strict=True)
            )
        before = before + length[:, tier, None]
    assert found is not None
    return found


def _read(state: CacheState, slot: int, heads: slice, tier: int, index: Tensor, own: Tensor) -> tuple[Tensor, ...]:
    """Tokens `index` int64 `[h, n]` of a tier; padding where not `own`."""
    layout, c = state.layouts[tier], state.conditioning
    page = page_of(state, state.page_table[slot].flatten(0, 1)[heads], tier, index)
    record = read_records(state, tier, page, index)
    k, _, score, position = decode(layout, record)
    position = torch.where(own, position, -1)
    if not is_plain(layout):
        bias = c.bias.flatten(0, 1)[heads][:, None]
        k = plain_keys(c, k, bias, position.clamp(0, c.cos.shape[0] - 1))
    votes, weight = votes_and_weights(layout, record)
    return k, position, torch.where(own, tier, PADDING).to(torch.int8), index, score, votes, weight


def add_votes(state: CacheState, slot: int, heads: slice, tokens: HeadTokens, more: Tensor) -> None:
    """Add votes (int32 `[h, n]`) to those stored beside tokens of `request_tokens`, up to the most that a tier counts.

    Tokens in the window and padding get none. May run beside other changes of the cache that leave these votes alone:
    what is not a token's own is only added 0 to.
    """
    words, table = pool_as(state, torch.int16), state.page_table[slot].flatten(0, 1)[heads]
    for tier, layout in enumerate(state.layouts):
        if not layout.tier.votes:
            continue
        own = tokens.tier == tier
        page = page_of(state, table, tier, tokens.index)
        added = torch.where(own, (tokens.votes + more).clamp_max(MOST_VOTES) - tokens.votes, 0)
        words.index_add_(0, vote_addresses(state, tier, page, tokens.index).flatten(), added.flatten().to(torch.int16))


def last_queries(state: CacheState, slot: int, heads: slice, seen: int) -> tuple[Tensor, Tensor]:
    """Queries of the last tokens of a request that has `seen` so many: fp32 `[W, h * G, D]`, and their positions, int64
    `[W]` in ascending order.
    """
    kv_heads = state.lengths.shape[2]
    position = torch.arange(max(0, seen - state.query_rows), seen, device=state.seen.device)
    rows = state.queries[slot][:, position % max(1, state.query_rows)]  # [L, W, Hq, D]
    grouped = rows.unflatten(2, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)  # [W, L * H, G, D]
    return grouped[:, heads].flatten(1, 2).float(), position
