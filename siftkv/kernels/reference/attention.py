"""Decode attention over the window and every tier: the slow, clear body. Everything is gathered, dequantised and
masked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from siftkv.kernels.reference.condition import bias_logits
from siftkv.kernels.reference.quantize import decode, score_from_bits, votes_and_weights
from siftkv.kernels.reference.scores import stochastic_score_bits, updated_mean
from siftkv.kernels.reference.tokens import is_plain, page_of, pool_as, read_records, state_addresses
from siftkv.kernels.state import CacheState, window_row


def append_to_window(state: CacheState, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write the new token of each request into its window: k, v `[B, H, D]`, slots `[B]` int64. The token's position is
    `seen[slot]`.
    """
    position = state.seen[slots]
    row = window_row(state, position, state.sinks[slots])
    state.window_k[slots, layer, :, row] = k.to(state.window_k.dtype)
    state.window_v[slots, layer, :, row] = v.to(state.window_v.dtype)
    state.window_score[slots, layer, :, row] = 0.0


def append_queries(state: CacheState, layer: int, slots: Tensor, q: Tensor) -> None:
    """Write the new query of each request (q `[B, Hq, D]`, of position `seen[slot]`) into its ring, if there is one."""
    if state.query_rows:
        state.queries[slots, layer, state.seen[slots] % state.query_rows] = q.to(state.queries.dtype)


def window_positions(state: CacheState, slots: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """Position and validity of every window row at query position `now` `[B]`: int64 and bool `[B, sink_rows + R]`.

    A ring row holds the newest position up to `now` that falls on it, if that is still in the window.
    """
    rows, ring = torch.arange(state.sink_rows, device=now.device), torch.arange(state.ring_rows, device=now.device)
    sinks, now = state.sinks[slots, None], now[:, None]
    newest = now - (now - ring) % state.ring_rows
    position = torch.cat([rows.expand(len(slots), -1), newest], 1)
    valid = torch.cat([(rows < sinks) & (rows <= now), newest >= state.window_start[slots, None]], 1)
    return position, valid


def decode_attention(state: CacheState, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one new token a request over all that its heads keep, the new token included.

    slots: `[B]` int64, distinct. q: `[B, Hq, D]`, k and v: `[B, H, D]`, in the model's dtype, after RoPE.
    Returns `[B, Hq, D]` in q's dtype. Writes k and v into the window, q into the ring of queries if there is one and,
    for requests at a refresh position, new scores everywhere. A token's log-weight is added to its logit; tokens in
    skipped pages take no part and keep their scores.
    """
    append_to_window(state, layer, slots, k, v)
    append_queries(state, layer, slots, q)
    batch, heads, dim = k.shape
    now = state.seen[slots]
    query = q.float().view(batch, heads, -1, dim)
    scale = 1.0 / math.sqrt(dim)
    position, valid = window_positions(state, slots, now)
    keys = state.window_k[slots, layer].float()
    logits = [(torch.einsum("bhgd,bhnd->bhgn", query, keys) * scale).masked_fill(~valid[:, None, None], -math.inf)]
    # Rows that hold nothing may hold NaN of a request that failed, and 0 x NaN is NaN.
    values = [state.window_v[slots, layer].float().masked_fill(~valid[:, None, :, None], 0.0)]
    for tier in range(len(state.layouts)):
        tier_logits, tier_values = _tier_logits(state, layer, slots, query, tier, scale)
        logits.append(tier_logits)
        values.append(tier_values)
    probability = torch.softmax(torch.cat(logits, -1), -1)
    out = torch.einsum("bhgn,bhnd->bhgd", probability, torch.cat(values, 2))
    _refresh_scores(state, layer, slots, probability.amax(2), position, now)
    return out.reshape(batch, -1, dim).to(q.dtype)


def tier_tokens(state: CacheState, layer: int, slots: Tensor, tier: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of a tier, padded to the longest head: slot in tier int64 `[n]`, page int64 and valid bool `[B, H, n]`."""
    length = state.lengths[slots, layer, :, tier].long()
    index = torch.arange(int(length.max()) if length.numel() else 0, device=slots.device)
    expanded = index.expand(*length.shape, -1)
    return index, page_of(state, state.page_table[slots, layer], tier, expanded), expanded < length[..., None]


def visible_tokens(state: CacheState, layer: int, slots: Tensor, tier: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `tier_tokens`, but tokens in skipped pages are not valid."""
    index, page, valid = tier_tokens(state, layer, slots, tier)
    if state.skips:
        valid = valid & (page_of(state, state.page_skip[slots, layer], tier, index.expand_as(page)) == 0)
    return index, page, valid


def _tier_logits(
    state: CacheState, layer: int, slots: Tensor, query: Tensor, tier: int, scale: float
) -> tuple[Tensor, Tensor]:
    index, page, valid = visible_tokens(state, layer, slots, tier)
    record = read_records(state, tier, page, index.expand_as(page))
    k, v, _, position = decode(state.layouts[tier], record)
    c = state.conditioning
    if is_plain(state.layouts[tier]):
        logits = torch.einsum("bhgd,bhnd->bhgn", query, k)
    else:
        rotated = query @ c.rotation if c.rotates else query
        logits = torch.einsum("bhgd,bhnd->bhgn", rotated, k)
        if c.has_bias:
            inside = position.clamp(0, c.cos.shape[0] - 1)
            logits = logits + bias_logits(c, query, c.bias[layer], inside)
    _, weight = votes_and_weights(state.layouts[tier], record)
    logits = logits * scale + weight[:, :, None]
    return logits.masked_fill(~valid[:, :, None], -math.inf), v.masked_fill(~valid[..., None], 0.0)


def _refresh_scores(
    state: CacheState, layer: int, slots: Tensor, attention: Tensor, position: Tensor, now: Tensor
) -> None:
    """`attention` `[B, H, n]`: window rows first, then the tiers, each padded to its longest head."""
    interval = state.refresh[slots]
    due = (interval > 0) & (now % interval.clamp_min(1) == 0)
    if not bool(due.any()):
        return
    due, now, interval, horizon = (x[:, None, None] for x in (due, now, interval, state.horizon[slots]))
    rows = position.shape[1]
    old = state.window_score[slots, layer]
    mean = updated_mean(old, attention[..., :rows], position[:, None], now, interval, horizon)
    state.window_score[slots, layer] = torch.where(due, mean, old)
    start = rows
    for tier, layout in enumerate(state.layouts):
        index, page, valid = visible_tokens(state, layer, slots, tier)
        here = attention[..., start : start + len(index)]
        start += len(index)
        if not layout.tier.scores or not len(index):
            continue
        score_at, position_at = state_addresses(state, tier, page, index.expand_as(page))
        scores, positions = pool_as(state, torch.int16), pool_as(state, torch.int32)
        token = positions[position_at].long()
        mean = updated_mean(score_from_bits(scores[score_at]), here, token, now, interval, horizon)
        write = valid & due
        scores[score_at[write]] = stochastic_score_bits(mean, token, now.expand_as(token))[write].to(torch.int16)
