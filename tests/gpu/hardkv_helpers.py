"""Caches of Hard-KV requests on a GPU, and bounds on what a selection may find."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from siftkv.cache import CacheSpec, KVCache, SlotRule, build_conditioning, compaction
from siftkv.cache.page_size import choose_page_bytes
from siftkv.formats import PageLayout, Tier, TierFormat
from siftkv.kernels import reference
from siftkv.kernels.reference.attention import tier_tokens
from siftkv.kernels.reference.tokens import pool_as, weight_addresses
from siftkv.kernels.state import SelectionRule
from siftkv.policies.hardkv.metrics import METRICS
from siftkv.policies.hardkv.rows import LayerTokens, attention_rows

LAYERS, HEADS, SINKS, WINDOW, QUERIES = 2, 2, 3, 24, 32


def hard_cache(
    formats: tuple[str, ...] = ("bf16",),
    dim: int = 128,
    group: int = 4,
    weights: bool = False,
    bias: bool = False,
    skips: bool = False,
    lengths: tuple[int, ...] = (3100, 2, 700, 27, 191),
    pages: int = 6000,
    page_tokens: int | None = None,
    drops: bool = True,
) -> KVCache:
    """Ragged heads whose older tokens are in the last format, newer ones in the first, some dropped (`drops`); head 0
    of the request of 191 tokens keeps none. A request's slot is its place in `lengths`. page_tokens: of a page of the
    first format; None = as an engine chooses.
    """
    dtype = torch.float16 if formats[0] == "fp16" else torch.bfloat16
    tiers = tuple(Tier(TierFormat.parse(name), votes=True, weights=weights) for name in formats)
    page_bytes = choose_page_bytes(tiers, dim, gpu=True)
    if page_tokens is not None:
        page_bytes = -(-page_tokens * PageLayout(tiers[0], dim, 1 << 24).token_bytes // 128) * 128
    spec = CacheSpec(
        LAYERS,
        HEADS,
        dim,
        dtype,
        tiers,
        pages,
        len(lengths),
        4096,
        max_window=WINDOW,
        sink_rows=4,
        page_bytes=page_bytes,
        query_rows=QUERIES,
        num_heads=HEADS * group,
        skips=skips,
    )
    angle = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(dim // 2) * 2 / dim)
    biases = [torch.randn(HEADS, dim) * 8 * (torch.rand(HEADS, dim) < 0.1) if bias else None] * LAYERS
    spread = [torch.ones(HEADS, dim)] * LAYERS
    conditioning = build_conditioning(LAYERS, HEADS, dim, angle.cos().cuda(), angle.sin().cuda(), biases, spread)
    cache = KVCache(spec, conditioning, reference)  # type: ignore[arg-type]
    cache.state.pages.random_(0, 256)
    for length in lengths:
        _fill(cache, length, group, 0.5 if drops else 0.0)
    if weights:
        _fill_weights(cache)
    return cache


def _fill(cache: KVCache, length: int, group: int, most_dropped: float) -> None:
    spec, shape = cache.spec, (LAYERS, HEADS, len(cache.spec.tiers))
    slot = cache.admit(SlotRule(WINDOW, SINKS, torch.zeros(shape), torch.full(shape, 2**30), 8))
    for layer in range(LAYERS):
        k, v = torch.randn(2, length, HEADS, spec.head_dim, device="cuda", dtype=spec.dtype)
        k[::37] *= 2.0
        peaks = torch.linspace(0.5, 2.5, HEADS * group, device="cuda", dtype=spec.dtype)[:, None]
        q = torch.randn(length, HEADS * group, spec.head_dim, device="cuda", dtype=spec.dtype) * peaks
        old = torch.arange(length, device="cuda") < length * 2 // 3
        tier = torch.where(old, len(spec.tiers) - 1, 0).expand(HEADS, -1)
        dropped = torch.rand(HEADS, length, device="cuda") < torch.rand(HEADS, 1, device="cuda") * most_dropped
        tier = torch.where(dropped, -1, tier)
        if length == 191:
            tier[0] = -1
        score = torch.rand(HEADS, length, device="cuda") ** 4 * 0.02
        cache.store_prompt(layer, slot, k, v, score, tier.to(torch.int8))
        cache.store_queries(layer, cache.ring_places([(slot, 0, length)]), q)
    assert cache.finish_prompt(slot, length) is None


def _fill_weights(cache: KVCache) -> None:
    state = cache.state
    for layer in range(LAYERS):
        for tier in range(len(state.layouts)):
            slots = torch.arange(len(state.seen), device="cuda")
            index, page, valid = tier_tokens(state, layer, slots, tier)
            at = weight_addresses(state, tier, page, index.expand_as(page))[valid]
            pool_as(state, torch.float32)[at] = torch.randn(len(at), device="cuda") * 0.7


def layer_tokens(cache: KVCache, layer: int, slot: int) -> LayerTokens:
    """A layer as the reference selection sees it."""
    tokens = cache.tokens(layer, slot)
    q, position = cache.queries(layer, slot)
    return LayerTokens(q, position, tokens.k, tokens.position, tokens.tier >= 0, tokens.weight, tokens.score)


def rule_for(
    cache: KVCache, metric: str = "attention", p: float = 0.9, pool: int = 7, budget: int = 1 << 20
) -> SelectionRule:
    """All of a cache's tiers are sources, the last one the oldest."""
    return SelectionRule(p, metric, pool, True, budget, tuple(reversed(range(len(cache.spec.tiers)))))


def _at_least(x: Tensor, count: Tensor, slack: float) -> Tensor:
    """Whether each `x[..., n]` is within `slack` of the `count`-th largest of its row."""
    kth = x.sort(-1, descending=True).values.gather(-1, (count - 1).clamp(0, x.shape[-1] - 1)[..., None])
    return (x >= kth - slack) & (count > 0)[..., None]


def vote_bounds(tokens: LayerTokens, rule: SelectionRule, noise: float) -> tuple[Tensor, Tensor]:
    """The fewest and the most votes that each token may get, int64 `[H, n]`. noise: octaves, error of logits."""
    rows = attention_rows(tokens)
    if rule.p >= 1.0:
        everything = (rows.visible & tokens.candidate[:, None]).sum(1)
        return everything, everything
    buckets = 4 if rule.metric == "snapkv" else 8
    octaves = rows.logits.double() / torch.log(torch.tensor(2.0)).item()
    most_p = 1 - (1 - rule.p) * 2 ** (-1 / buckets - 2 * noise)
    least_p = rule.p / (rule.p + (1 - rule.p) * 2 ** (2 * noise))
    exact, most = (_count(rows.raw, p) for p in (least_p, most_p))
    most = _at_least(octaves, most, 1.1 / buckets + noise).sum(-1)
    metric = METRICS[rule.metric](rule.pool).logits(rows, tokens).double() / torch.log(torch.tensor(2.0)).item()
    if rule.metric == "accumulated":
        unseen = (tokens.position >= 0).sum(-1)[:, None] - rows.visible.sum(-1)
        upper = _at_least(metric, most + unseen, 2e-3)
        lower = ~_at_least(metric, exact + 1, 2e-3) & _at_least(metric, exact, 0.0)
    else:
        upper = _at_least(metric, most, (1.1 / buckets if rule.metric == "snapkv" else 0.0) + noise)
        if rule.metric == "snapkv":
            weakest = octaves.sort(-1, descending=True).values.gather(-1, (most - 1).clamp_min(0)[..., None])
            upper |= metric >= weakest + 13.0
        lower = _at_least(metric, exact, -noise)
    seen = rows.visible & tokens.candidate[:, None]
    return (lower & seen).sum(1), (upper & seen).sum(1)


def _count(raw: Tensor, p: float) -> Tensor:
    largest = raw.double().sort(-1, descending=True).values
    return ((largest.cumsum(-1) < p).sum(-1) + 1).minimum((raw > 0).sum(-1))


def twin(cache: KVCache) -> KVCache:
    made = copy.copy(cache)
    scratch, cache.state.scratch = cache.state.scratch, {}
    made.state = copy.deepcopy(cache.state)
    cache.state.scratch = scratch
    return made


def candidates(cache: KVCache, layer: int, slot: int, keep: Tensor) -> tuple[compaction.HeadTokens, Tensor]:
    """All tokens of a layer, and `keep` of a selection laid over them."""
    tokens = cache.tokens(layer, slot)
    place = ((tokens.tier >= 0).cumsum(-1) - 1).clamp_min(0)
    return tokens, (tokens.tier >= 0) & (keep[layer].gather(-1, place) > 0)
