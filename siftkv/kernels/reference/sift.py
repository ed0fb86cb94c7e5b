"""The policy step of decoding: the token that leaves the window is classed, and what it displaces moves down. All
layers and heads at once.

Tiers are ordered; a tier accepts a token whose score reaches `alpha / N` (N tokens so far) and that has a positive cap.
Where a token enters a tier, the tier's weakest token is examined: if it scores below the tier's threshold, or the tier
would pass its cap, it is overwritten by the newcomer and goes on to the next tier, and so on; below the last tier it is
gone. So a token goes high -> low -> gone (DiffKV, section 4.3), never straight down unless it scores so.

Plan (scores only), coordinate (prefix sum over the pages that appends need), commit (move the records).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.kernels.reference.bookkeeping import note_faults, note_peaks
from siftkv.kernels.reference.condition import condition_keys
from siftkv.kernels.reference.pages import return_pages, take_pages, tokens_a_page
from siftkv.kernels.reference.quantize import decode, encode, score_from_bits
from siftkv.kernels.reference.tokens import is_plain, page_of, pool_as, read_records, state_addresses, write_records
from siftkv.kernels.state import UNLIMITED, CacheState, table_column, window_row


@dataclass
class TierPlan:
    """What happens in one tier, bool and int64 `[B, L, H]`: at most one of append, overwrite and remove is true for a
    head slot.

    victim: slot in tier that is overwritten or removed.
    """

    append: Tensor
    overwrite: Tensor
    remove: Tensor
    victim: Tensor


def sift_step(state: CacheState, slots: Tensor, examine: bool = True) -> Tensor:
    """Advance every request in `slots` (int64 `[B]`, distinct) by the token that was just attended to, and sift the
    token that leaves its window. `not_finite` and `peak_pages` of the requests are brought up to date.

    examine=False: the caller knows that `catch_up` is 0 for all of them. Returns bool `[B]`: false where the free pages
    did not suffice; that request's token stays in the slack of its window, and nothing of what it keeps changed.
    """
    note_faults(state, slots)
    state.seen[slots] += 1
    start, seen = state.window_start[slots], state.seen[slots]
    leaves = seen - start > state.window[slots]
    score, k, v = _leaving_token(state, slots, start)
    active = leaves[:, None, None].expand(score.shape)
    done = _cascade(state, slots, seen, active, score, start, k, v, examine=False)
    state.window_start[slots] += (leaves & done).long()
    for turn in range(int(state.catch_up[slots].max()) if examine and len(slots) else 0):
        more = done & (state.catch_up[slots] > turn)
        nothing = torch.zeros_like(active)
        _cascade(
            state, slots[more], seen[more], nothing[more], score[more], start[more], k[more], v[more], examine=True
        )
    note_peaks(state, slots)
    return done


def _leaving_token(state: CacheState, slots: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row = window_row(state, position, state.sinks[slots])
    k = state.window_k[slots, :, :, row].float()
    return state.window_score[slots, :, :, row], k, state.window_v[slots, :, :, row].float()


def _weakest(state: CacheState, slots: Tensor, tier: int) -> tuple[Tensor, Tensor]:
    """Lowest score of each head's tier and its slot in tier (the first of equals): fp32 (inf where empty) and int64
    `[B, L, H]`.
    """
    length = state.lengths[slots][..., tier].long()
    longest = int(length.max()) if length.numel() else 0
    if not longest or not state.layouts[tier].tier.scores:
        return torch.full(length.shape, torch.inf, device=length.device), torch.zeros_like(length)
    index = torch.arange(longest, device=length.device).expand(*length.shape, -1)
    page = page_of(state, state.page_table[slots], tier, index)
    score_at, _ = state_addresses(state, tier, page, index)
    score = score_from_bits(pool_as(state, torch.int16)[score_at]).masked_fill(index >= length[..., None], torch.inf)
    return score.min(-1)


def _caps(state: CacheState, slots: Tensor, seen: Tensor, tier: int) -> Tensor:
    """Tokens that each head's tier may hold after `seen` tokens, int64 `[B, L, H]`: a share fills its last page."""
    cap, tokens = state.cap[slots][..., tier].long(), state.layouts[tier].tokens
    share = (state.cap_share[slots][..., tier] * seen[:, None, None].float()).ceil()
    filled = -(-share.clamp(-1.0, UNLIMITED).long() // tokens) * tokens
    return torch.where(share < cap.float(), filled.minimum(cap), cap)


def _plan(
    state: CacheState, slots: Tensor, seen: Tensor, active: Tensor, score: Tensor, examine: bool
) -> list[TierPlan]:
    plans = []
    for tier in range(len(state.layouts)):
        length, cap = state.lengths[slots][..., tier].long(), _caps(state, slots, seen, tier)
        threshold = state.alpha[slots][..., tier] / seen[:, None, None].float()
        weakest, victim = _weakest(state, slots, tier)
        accept = active & (cap > 0) & (score >= threshold)
        full = length + 1 > cap
        accept &= ~(full & (score < weakest))
        leaves = weakest < threshold
        overwrite = accept & (leaves | (full & (weakest <= score)))
        remove = ~active & leaves & (length > 0) if examine else torch.zeros_like(active)
        plans.append(TierPlan(accept & ~overwrite, overwrite, remove, victim))
        score = torch.where(overwrite | remove, weakest, score)
        active = (active & ~accept) | overwrite | remove
    return plans


def _cascade(
    state: CacheState,
    slots: Tensor,
    seen: Tensor,
    active: Tensor,
    score: Tensor,
    start: Tensor,
    k: Tensor,
    v: Tensor,
    examine: bool,
) -> Tensor:
    plans = _plan(state, slots, seen, active, score, examine)
    granted = _coordinate(state, slots, plans)
    position = start[:, None, None].expand(score.shape).clone()
    plain = True
    for tier, plan in enumerate(plans):
        layout = state.layouts[tier]
        if plain and not is_plain(layout):
            c = state.conditioning
            inside = position.clamp(0, c.cos.shape[0] - 1)
            k, plain = condition_keys(c, k, c.bias, inside), False
        k, v, score, position = _commit_tier(state, slots, tier, plan, granted, k, v, score, position)
    return granted


def _coordinate(state: CacheState, slots: Tensor, plans: list[TierPlan]) -> Tensor:
    """Take the pages that appends need, requests in order while they last; write them into the tables. Returns bool
    `[B]`: served.
    """
    length = state.lengths[slots].long()
    tokens = tokens_a_page(state)
    need = torch.stack([p.append for p in plans], -1) & (length % tokens == 0)
    served = need.flatten(1).sum(1).cumsum(0) <= state.free_pages()
    need &= served[:, None, None, None]
    request, layer, head, tier = need.nonzero(as_tuple=True)
    page = take_pages(state, torch.ones_like(request))
    index = (length // tokens)[request, layer, head, tier]
    column = torch.where(tier % 2 == 0, index, state.width - 1 - index)
    state.page_table[slots[request], layer, head, tier // 2, column] = page
    return served


def _commit_tier(
    state: CacheState,
    slots: Tensor,
    tier: int,
    plan: TierPlan,
    granted: Tensor,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Apply one tier's plan; returns the token that each head slot carries on to the next tier."""
    layout = state.layouts[tier]
    granted = granted[:, None, None]
    append, overwrite, remove = plan.append & granted, plan.overwrite & granted, plan.remove & granted
    length = state.lengths[slots][..., tier].long()
    out = _read(state, slots, tier, plan.victim, overwrite | remove)
    _remove(state, slots, tier, remove, plan.victim, length)
    enters = append | overwrite
    where = enters.nonzero(as_tuple=True)
    in_tier = torch.where(append, length, plan.victim)[where]
    page = _page_at(state, slots, tier, where, in_tier)
    write_records(state, tier, page, in_tier, encode(layout, k[where], v[where], score[where], position[where]))
    state.lengths[slots, ..., tier] += (append.int() - remove.int()).to(torch.int32)
    left = (overwrite | remove).nonzero(as_tuple=True)
    k, v, score, position = k.clone(), v.clone(), score.clone(), position.clone()
    for carried, read in zip((k, v, score, position), out, strict=True):
        carried[left] = read
    return k, v, score, position


def _page_at(state: CacheState, slots: Tensor, tier: int, where: tuple[Tensor, ...], in_tier: Tensor) -> Tensor:
    request, layer, head = where
    return page_of(state, state.page_table[slots[request], layer, head], tier, in_tier[:, None])[:, 0]


def _read(
    state: CacheState, slots: Tensor, tier: int, in_tier: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    where = chosen.nonzero(as_tuple=True)
    page = _page_at(state, slots, tier, where, in_tier[where])
    return decode(state.layouts[tier], read_records(state, tier, page, in_tier[where]))


def _remove(state: CacheState, slots: Tensor, tier: int, remove: Tensor, victim: Tensor, length: Tensor) -> None:
    """Fill the hole with the tier's last token; a page that this empties goes back."""
    where = remove.nonzero(as_tuple=True)
    if not len(where[0]):
        return
    last, hole = length[where] - 1, victim[where]
    source, target = (_page_at(state, slots, tier, where, index) for index in (last, hole))
    write_records(state, tier, target, hole, read_records(state, tier, source, last))
    emptied = last % state.layouts[tier].tokens == 0
    request, layer, head = (x[emptied] for x in where)
    column = table_column(state.width, tier, last[emptied] // state.layouts[tier].tokens)
    return_pages(state, source[emptied])
    state.page_table[slots[request], layer, head, tier // 2, column] = -1
    if state.skips:
        state.page_skip[slots[request], layer, head, tier // 2, column] = 0
