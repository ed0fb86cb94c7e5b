"""Reading what a head keeps in time order, and rewriting it: survivors become contiguous, pages that this frees return.

Where `siftkv.kernels` move one token a step, these operations look at a whole layer of a request at once. They are
plain PyTorch, vectorised over heads and tokens, and run on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.errors import FormatError, OutOfPages, SiftKVError
from siftkv.kernels.prompts import to_device
from siftkv.kernels.reference.attention import tier_tokens, window_positions
from siftkv.kernels.reference.condition import condition_keys, plain_keys
from siftkv.kernels.reference.pages import extend_tier, pages_needed, return_pages
from siftkv.kernels.reference.quantize import MOST_VOTES, decode, encode, score_bits, votes_and_weights
from siftkv.kernels.reference.tokens import (
    is_plain,
    page_of,
    pool_as,
    read_records,
    state_addresses,
    vote_addresses,
    write_records,
)
from siftkv.kernels.state import CacheState, table_column

PADDING = -1
IN_WINDOW = -2
"""What stands in `HeadTokens.tier` instead of a tier."""


@dataclass(frozen=True)
class HeadTokens:
    """All tokens that the heads of one layer of one request keep, in time order, padded to the longest head.

    k: fp32 `[H, n, D]`, plain keys after RoPE. v: fp32 `[H, n, D]` where asked for.
    position: int64 `[H, n]`, -1 = padding. tier: int8 `[H, n]`, tier of the pool, -2 = a sink or a recent token in the
        window, -1 = padding. index: int64 `[H, n]`, which token of its tier, or row of the window.
    score: fp32 `[H, n]`, mean attention. votes: int32 `[H, n]`. weight: fp32 `[H, n]`, log-weights; zeros where a tier
        keeps none.
    """

    k: Tensor
    v: Tensor | None
    position: Tensor
    tier: Tensor
    index: Tensor
    score: Tensor
    votes: Tensor
    weight: Tensor


@dataclass(frozen=True)
class RingPlaces:
    """Where queries of prompts go: request slots, rows of the ring, and their tokens in the batch, int64 `[N]` each."""

    slots: Tensor
    rows: Tensor
    tokens: Tensor


def ring_places(state: CacheState, prompts: Sequence[tuple[int, int, int]]) -> RingPlaces:
    """See `siftkv.cache.KVCache.ring_places`."""
    rows = state.query_rows
    kept = [(slot, p % rows, start + p) for slot, start, length in prompts for p in range(length)[-rows:] if rows]
    slots, ring, tokens = torch.tensor(kept, dtype=torch.int64).view(-1, 3).T
    device = state.queries.device
    return RingPlaces(to_device(slots, device), to_device(ring, device), to_device(tokens, device))


def store_queries(state: CacheState, layer: int, places: RingPlaces, q: Tensor) -> None:
    """See `siftkv.cache.KVCache.store_queries`."""
    state.queries[places.slots, layer, places.rows] = q[places.tokens].to(state.queries.dtype)


def recent_queries(state: CacheState, layer: int, slot: int) -> tuple[Tensor, Tensor]:
    """See `siftkv.cache.KVCache.queries`."""
    seen, rows = int(state.seen[slot]), state.query_rows
    position = torch.arange(max(0, seen - rows), seen, device=state.seen.device)
    return state.queries[slot, layer, position % max(rows, 1)].float(), position


def head_tokens(state: CacheState, layer: int, slot: int, values: bool = False) -> HeadTokens:
    """See `siftkv.cache.KVCache.tokens`."""
    parts = [_window_part(state, layer, slot)]
    for tier in range(len(state.layouts)):
        parts += _tier_part(state, layer, slot, tier)
    k, v, position, tier_of, index, score, votes, weight = (torch.cat(x, 1) for x in zip(*parts, strict=True))
    absent = tier_of == PADDING
    order = position.masked_fill(absent, torch.iinfo(torch.int64).max).argsort(dim=-1, stable=True)
    order = order[:, : int((~absent).sum(-1).max())]

    def sorted_by_time(x: Tensor) -> Tensor:
        return x.gather(1, order) if x.ndim == 2 else x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))

    found = [sorted_by_time(x) for x in (position, tier_of, index, score, votes, weight)]
    absent = found[1] == PADDING
    # What no token owns may be anything, NaN too.
    found[3:] = [x.masked_fill(absent, 0) for x in found[3:]]
    k, v = (sorted_by_time(x).masked_fill(absent[..., None], 0.0) for x in (k, v))
    return HeadTokens(k, v if values else None, *found)


def _window_part(state: CacheState, layer: int, slot: int) -> tuple[Tensor, ...]:
    slots = torch.tensor([slot], device=state.seen.device)
    position, valid = window_positions(state, slots, state.seen[slots] - 1)
    score = state.window_score[slot, layer]
    shape = score.shape
    tier = torch.where(valid, IN_WINDOW, PADDING).to(torch.int8).expand(shape)
    row = torch.arange(shape[1], device=score.device).expand(shape)
    votes = torch.zeros(shape, dtype=torch.int32, device=score.device)
    k, v = state.window_k[slot, layer].float(), state.window_v[slot, layer].float()
    return k, v, torch.where(valid, position, -1).expand(shape), tier, row, score, votes, torch.zeros_like(score)


def _tier_part(state: CacheState, layer: int, slot: int, tier: int) -> list[tuple[Tensor, ...]]:
    """Tokens of a tier in the order of the fields of `HeadTokens`; nothing where no head has any."""
    slots = torch.tensor([slot], device=state.seen.device)
    index, page, valid = (x[0] if x.ndim == 3 else x for x in tier_tokens(state, layer, slots, tier))
    if not len(index):
        return []
    layout = state.layouts[tier]
    if not layout.tier.positions:
        raise FormatError(
            f"tier {layout.tier.name} stores no positions, so its tokens have no order in time: "
            "open the pool with a policy that needs them as its default"
        )
    index = index.expand_as(page)
    record = read_records(state, tier, page, index)
    k, v, score, position = decode(layout, record)
    if not is_plain(layout):
        c = state.conditioning
        k = plain_keys(c, k, c.bias[layer][:, None], position.clamp(0, c.cos.shape[0] - 1))
    votes, weight = votes_and_weights(layout, record)
    tiers = torch.where(valid, tier, PADDING).to(torch.int8)
    return [(k, v, torch.where(valid, position, -1), tiers, index, score, votes, weight)]


def write_votes(
    state: CacheState, layer: int, slot: int, tokens: HeadTokens, votes: Tensor | None, score: Tensor | None
) -> None:
    """See `siftkv.cache.KVCache.write_votes`."""
    words = pool_as(state, torch.int16)
    for tier, layout in enumerate(state.layouts):
        where = (tokens.tier == tier).nonzero(as_tuple=True)
        index = tokens.index[where]
        page = _pages(state, layer, slot, tier, where[0], index)
        if votes is not None and layout.tier.votes:
            saturated = votes[where].clamp(0, MOST_VOTES).to(torch.int32)
            words[vote_addresses(state, tier, page, index)] = saturated.to(torch.int16)
        if score is not None and layout.tier.scores:
            words[state_addresses(state, tier, page, index)[0]] = score_bits(score[where].float()).to(torch.int16)


def skip_pages(state: CacheState, layer: int, slot: int, tokens: HeadTokens, selected: Tensor) -> None:
    """See `siftkv.cache.KVCache.skip_pages`. A page with room is read in any case: what enters it later was not
    judged.
    """
    if not state.skips:
        raise SiftKVError("this cache cannot skip pages: open it with a policy that skips some as its default")
    state.page_skip[slot, layer] = 0
    for tier, layout in enumerate(state.layouts):
        full = state.lengths[slot, layer, :, tier].long() // layout.tokens
        column = torch.arange(state.width, device=full.device)
        here = (tokens.tier == tier) & selected
        page = torch.where(here, tokens.index // layout.tokens, state.width)
        read = torch.zeros(len(full), state.width + 1, dtype=torch.bool, device=full.device)
        read.scatter_(1, page, True)
        skipped = (column < full[:, None]) & ~read[:, : state.width]
        state.page_skip[slot, layer, :, tier // 2] |= skipped[:, table_column(state.width, tier, column)]


def rewrite(
    state: CacheState,
    layer: int,
    slot: int,
    tokens: HeadTokens,
    keep: Tensor,
    target: int,
    merged: Mapping[str, Tensor] | None = None,
) -> None:
    """Leave of one layer's tokens in tiers only those of `keep` (bool `[H, n]`), contiguous and in time order in the
    tier `target`. Sinks and recent tokens in the window stay, whatever `keep` says of them.

    tokens: of `head_tokens`, and nothing has moved since. What stays in its tier keeps its bytes; other tokens are
    decoded and encoded. Positions, scores, votes and log-weights are kept. Pages that are not needed any more return at
    once, and no page is skipped afterwards.
    merged: new contents of the kept tokens in `merged["changed"]` (bool `[H, n]`): `k` (plain) and `v` fp32 `[H, n,
        D]`, `weight` and `score` fp32 `[H, n]`.
    Raises FormatError when the tier keeps no positions, or no log-weights for what was merged, and OutOfPages when it
    needs more pages than are free; nothing is changed then.
    """
    kept = keep & (tokens.tier >= 0)
    count = kept.sum(-1)
    _check_target(state, layer, slot, target, count, merged is not None)
    where = kept.nonzero(as_tuple=True)
    record = _survivors(state, layer, slot, tokens, where, target)
    if merged is not None:
        _put_merged(state, layer, target, tokens, where, merged, record)
    _resize(state, layer, slot, target, count)
    index = (kept.cumsum(-1) - 1)[where]
    write_records(state, target, _pages(state, layer, slot, target, where[0], index), index, record)
    if state.skips:
        state.page_skip[slot, layer] = 0


def _pages(state: CacheState, layer: int, slot: int, tier: int, head: Tensor, index: Tensor) -> Tensor:
    """Page ids (int64 `[n]`) of the `index`-th tokens of a tier of heads, both int64 `[n]`."""
    return page_of(state, state.page_table[slot, layer][head], tier, index[:, None])[:, 0]


def _check_target(state: CacheState, layer: int, slot: int, target: int, count: Tensor, weighs: bool) -> None:
    tier = state.layouts[target].tier
    if not tier.positions or (weighs and not tier.weights):
        what = "log-weights" if tier.positions else "positions"
        raise FormatError(f"tier {tier.name} keeps no {what}: open the pool with a policy that needs them")
    held = int(pages_needed(state, state.lengths[slot, layer]).sum())
    more = int((-(-count // state.layouts[target].tokens)).sum()) - held
    if more > state.free_pages():
        raise OutOfPages(
            f"rewriting layer {layer} in {tier.name} needs {more} more pages and {state.free_pages()} are free"
        )


def _survivors(
    state: CacheState, layer: int, slot: int, tokens: HeadTokens, where: tuple[Tensor, ...], target: int
) -> Tensor:
    """Records of the tokens `where` (head, column) as the tier `target` stores them: uint8 `[K, token_bytes]`."""
    source, index = tokens.tier[where], tokens.index[where]
    record = state.pages.new_empty(len(source), state.layouts[target].token_bytes)
    for tier, layout in enumerate(state.layouts):
        own = (source == tier).nonzero()[:, 0]
        head, inside = where[0][own], index[own]
        old = read_records(state, tier, _pages(state, layer, slot, tier, head, inside), inside)
        if tier != target and len(own):
            k, v, score, position = decode(layout, old)
            k = _keys_for(state, layer, head, k, position, layout_plain=is_plain(layout), target=target)
            old = encode(state.layouts[target], k, v, score, position, *votes_and_weights(layout, old))
        if len(own):
            record[own] = old
    return record


def _keys_for(
    state: CacheState, layer: int, head: Tensor, k: Tensor, position: Tensor, layout_plain: bool, target: int
) -> Tensor:
    """Keys `[K, D]` of heads, plain or conditioned, as the tier `target` wants them."""
    c, wanted = state.conditioning, is_plain(state.layouts[target])
    if layout_plain == wanted:
        return k
    convert = plain_keys if wanted else condition_keys
    return convert(c, k, c.bias[layer][head], position.clamp(0, c.cos.shape[0] - 1))


def _put_merged(
    state: CacheState,
    layer: int,
    target: int,
    tokens: HeadTokens,
    where: tuple[Tensor, ...],
    merged: Mapping[str, Tensor],
    record: Tensor,
) -> None:
    """Overwrite the records of tokens with new contents; they keep their positions and votes."""
    changed = merged["changed"][where].nonzero()[:, 0]
    head, column = (x[changed] for x in where)
    k, v, weight, score = (merged[name][head, column].float() for name in ("k", "v", "weight", "score"))
    position, layout = tokens.position[head, column], state.layouts[target]
    k = _keys_for(state, layer, head, k, position, layout_plain=True, target=target)
    votes, _ = votes_and_weights(layout, record[changed])
    record[changed] = encode(layout, k, v, score, position, votes, weight)


def _resize(state: CacheState, layer: int, slot: int, target: int, count: Tensor) -> None:
    """Give the tier `target` room for `count` (int64 `[H]`) tokens a head and empty all others: its first pages stay,
    whatever is not needed returns, what lacks is taken.
    """
    tokens = state.layouts[target].tokens
    table, lengths = state.page_table[slot, layer], state.lengths[slot, layer]
    staying = torch.minimum(-(-lengths[:, target].long() // tokens), -(-count // tokens))
    page = table_column(state.width, target, torch.arange(state.width, device=table.device))
    stays = torch.zeros_like(table, dtype=torch.bool)
    stays[:, target // 2] = page < staying[:, None]
    gone = (table >= 0) & ~stays
    return_pages(state, table[gone])
    table[gone] = -1
    lengths.zero_()
    lengths[:, target] = torch.minimum(count, staying * tokens).to(torch.int32)
    extend_tier(state, layer, slot, target, count - lengths[:, target])
