"""Random cache states for kernel tests, filled through the reference kernels."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from siftkv.cache.page_size import choose_page_bytes
from siftkv.formats import PageLayout, Tier, TierFormat
from siftkv.kernels import reference
from siftkv.kernels.reference.attention import tier_tokens
from siftkv.kernels.reference.tokens import pool_as, read_records, state_addresses
from siftkv.kernels.state import UNLIMITED, CacheState, Conditioning


def random_orthogonal(dim: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0].contiguous()


def make_conditioning(
    layers: int, heads: int, dim: int, seed: int, max_len: int = 6000, rotates: bool = True, rank: int = 0
) -> Conditioning:
    """Random rotation and a key bias of up to `rank` rotary pairs a head (head 0 keeps none)."""
    g = torch.Generator().manual_seed(seed)
    rotation = random_orthogonal(dim, g) if rotates else torch.eye(dim)
    angle = torch.arange(max_len)[:, None] * 10000.0 ** (-torch.arange(dim // 2) * 2 / dim)
    ranks = torch.randint(0, rank + 1, (layers, heads), generator=g, dtype=torch.int32)
    ranks[:, 0] = 0
    if rank:
        ranks[:, -1] = rank
    pairs = torch.rand(layers, heads, dim // 2, generator=g).argsort(-1)[..., : max(rank, 1)].to(torch.int32)
    keep = torch.zeros(layers, heads, dim // 2)
    keep.scatter_(-1, pairs.long(), (torch.arange(max(rank, 1)) < ranks[..., None]).float())
    bias = torch.randn(layers, heads, dim, generator=g) * 4 * torch.cat([keep, keep], -1)
    return Conditioning(rotation, angle.cos(), angle.sin(), bias, pairs, ranks, bool(rank), rotates)


def make_state(
    tiers: tuple[str, ...],
    dim: int = 64,
    slots: int = 3,
    layers: int = 2,
    heads: int = 3,
    pages: int = 400,
    ring: int = 48,
    sinks: int = 4,
    window: int = 32,
    refresh: int = 0,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    rotates: bool = True,
    rank: int = 0,
    seed: int = 0,
    state_in_pages: bool = True,
    weights: bool = False,
    query_rows: int = 0,
    group: int = 3,
    skips: bool = False,
) -> CacheState:
    """An empty state: pages hold noise, so that reading what was never written shows."""
    g = torch.Generator().manual_seed(seed)
    parsed = tuple(Tier(TierFormat.parse(name), state_in_pages, state_in_pages, weights, weights) for name in tiers)
    page_bytes = choose_page_bytes(parsed, dim)
    layouts = tuple(PageLayout(tier, dim, page_bytes) for tier in parsed)
    shape, count = (slots, layers, heads), len(tiers)

    def filled(value: int) -> Tensor:
        return torch.full((slots,), value, dtype=torch.int64)

    rows = sinks + ring
    return CacheState(
        not_finite=torch.zeros(slots, dtype=torch.bool),
        peak_pages=torch.zeros(slots, dtype=torch.int64),
        layouts=layouts,
        sink_rows=sinks,
        pages=torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8, generator=g),
        free_ring=torch.randperm(pages, generator=g).to(torch.int32),
        counters=torch.tensor([0, pages]),
        page_table=torch.full((*shape, (count + 1) // 2, width), -1, dtype=torch.int32),
        lengths=torch.zeros(*shape, count, dtype=torch.int32),
        window_k=torch.randn(*shape, rows, dim, generator=g).to(dtype),
        window_v=torch.randn(*shape, rows, dim, generator=g).to(dtype),
        window_score=torch.rand(*shape, rows, generator=g) * 0.01,
        seen=filled(0),
        window_start=filled(0),
        sinks=filled(sinks),
        window=filled(window),
        refresh=filled(refresh),
        catch_up=filled(0),
        alpha=torch.zeros(*shape, count),
        cap=torch.full((*shape, count), 1 << 20, dtype=torch.int32),
        cap_share=torch.full((*shape, count), torch.inf),
        horizon=filled(UNLIMITED),
        queries=torch.zeros(slots, layers, query_rows, heads * group, dim, dtype=dtype),
        page_skip=torch.zeros(*shape, (count + 1) // 2, width if skips else 0, dtype=torch.uint8),
        conditioning=make_conditioning(layers, heads, dim, seed, rotates=rotates, rank=rank),
    )


def fill(state: CacheState, slot: int, tokens: int, seed: int, shares: tuple[float, ...]) -> None:
    """Put a prompt of `tokens` tokens into a slot: `shares[t]` of those outside the window go to tier t, the rest is
    dropped; head 0 of layer 0 keeps none.
    """
    g = torch.Generator().manual_seed(seed)
    sinks, window = int(state.sinks[slot]), int(state.window[slot])
    start = max(sinks, tokens - window)
    _, layers, heads, _, dim = state.window_k.shape
    for layer in range(layers):
        k, v = (torch.randn(tokens, heads, dim, generator=g).to(state.window_k.dtype) for _ in range(2))
        score = torch.rand(heads, tokens, generator=g) ** 4 * 0.02
        position = torch.arange(tokens)
        recent = (position < sinks) | (position >= start)
        reference.write_window(state, layer, slot, k[recent], v[recent], score[:, recent], position[recent])
        tier = random_tiers(heads, tokens, shares, g)
        tier[:, recent] = -1
        if layer == 0:
            tier[0] = -1
        reference.append_tokens(state, layer, slot, k, v, score, position, tier)
    state.seen[slot], state.window_start[slot] = tokens, start


def random_tiers(heads: int, tokens: int, shares: tuple[float, ...], generator: torch.Generator) -> Tensor:
    """int8 `[H, tokens]`."""
    edges = torch.tensor(shares).cumsum(0)
    tier = (torch.rand(heads, tokens, generator=generator)[..., None] >= edges).sum(-1)
    return torch.where(tier < len(shares), tier, -1).to(torch.int8)


def twin(state: CacheState) -> CacheState:
    """A deep copy without what kernels derived."""
    kept, state.scratch = state.scratch, {}
    made = copy.deepcopy(state)
    state.scratch = kept
    return made


def live_bytes(state: CacheState) -> dict[str, Any]:
    """Everything that two bodies must agree on to the bit: live tokens' records, tables, ring and window."""
    found: dict[str, Any] = {"free": free_ids(state)}
    slots = torch.arange(state.seen.shape[0])
    for layer in range(state.lengths.shape[1]):
        for tier in range(len(state.layouts)):
            index, page, valid = tier_tokens(state, layer, slots, tier)
            found[f"records {layer} {tier}"] = read_records(state, tier, page, index.expand_as(page))[valid]
    names = ("page_table", "lengths", "counters", "seen", "window_start", "window_k", "window_v", "window_score")
    return found | {name: getattr(state, name) for name in names}


def tier_scores(state: CacheState) -> Tensor:
    """Stored scores (16 bits as int32) of all live tokens of tiers that keep them, in one row."""
    slots, found = torch.arange(state.seen.shape[0]), []
    for layer in range(state.lengths.shape[1]):
        for tier, layout in enumerate(state.layouts):
            if layout.tier.scores:
                index, page, valid = tier_tokens(state, layer, slots, tier)
                at, _ = state_addresses(state, tier, page, index.expand_as(page))
                found.append(pool_as(state, torch.int16)[at][valid].to(torch.int32))
    return torch.cat(found)


def free_ids(state: CacheState) -> Tensor:
    """Ids of the free pages in the order in which they will be taken."""
    taken, returned = state.counters.tolist()
    return state.free_ring[torch.arange(taken, returned) % state.num_pages]


def assert_same(a: CacheState, b: CacheState) -> None:
    left, right = live_bytes(a), live_bytes(b)
    for name, value in left.items():
        assert torch.equal(value, right[name]), f"{name} differs"
