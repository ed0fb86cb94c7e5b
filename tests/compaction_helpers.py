"""A policy whose tokens are rewritten, and plain attention over what its heads keep, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from siftkv.cache import KVCache
from siftkv.cache.compaction import IN_WINDOW, PADDING, HeadTokens
from siftkv.engine.binding import BoundPolicy
from siftkv.formats import Tier, TierFormat
from siftkv.policies import DecodeRule, Policy, PromptView
from siftkv.policies.base import UNLIMITED
from tests.tiny import random_prompt, small_cache

LAYERS, HEADS, GROUP, DIM = 2, 2, 2, 16


@dataclass(frozen=True)
class Cascade(Policy):
    """Everything enters a dense tier; rewrites move it on to a quantised one."""

    name: ClassVar[str] = "cascade"
    window: int = 4
    sinks: int = 2
    refresh: int = 0
    query_rows: int = 8
    skips: bool = True

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return tuple(Tier(TierFormat.parse(x), votes=True, weights=True) for x in (dense, "k8v4"))

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        return torch.arange(length), torch.ones(length)

    def classify(self, prompt: PromptView) -> Tensor:
        return torch.zeros(prompt.score.shape, dtype=torch.int8)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        cap = torch.tensor([UNLIMITED, 0]).expand(num_layers, num_kv_heads, 2)
        return DecodeRule(torch.zeros(cap.shape), cap, refresh=self.refresh)


def opened(
    length: int = 60, seed: int = 0, refresh: int = 0, **options: Any
) -> tuple[KVCache, BoundPolicy, int, torch.Generator]:
    """A cache that holds one random prompt."""
    cache, [policy] = small_cache([Cascade(refresh=refresh)], **options)
    generator = torch.Generator().manual_seed(seed)
    slot = cache.admit(policy.rule)
    random_prompt(cache, policy, slot, length, generator)
    return cache, policy, slot, generator


def some(tokens: HeadTokens, generator: torch.Generator, share: float) -> Tensor:
    """A random choice of a layer's tokens, bool `[H, n]`."""
    return torch.rand(tokens.position.shape, generator=generator) < share


def masked_attention(tokens: HeadTokens, q: Tensor, seen: Tensor) -> Tensor:
    """Attention of q `[Hq, D]` to those of a layer's tokens that it sees (bool `[H, n]`): `[Hq, D]`."""
    assert tokens.v is not None
    query = q.float().view(len(tokens.k), -1, q.shape[-1])
    logits = query @ tokens.k.transpose(1, 2) / q.shape[-1] ** 0.5 + tokens.weight[:, None]
    p = logits.masked_fill(~(seen & (tokens.tier != PADDING))[:, None], -torch.inf).softmax(-1)
    return (p @ tokens.v).reshape(q.shape)


def attend(cache: KVCache, slot: int, generator: torch.Generator, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Attention of one random token in one layer, without a step: its query `[Hq, D]` and what came out."""
    q, k, v = (torch.randn(1, n, DIM, generator=generator).to(cache.spec.dtype) for n in (HEADS * GROUP, HEADS, HEADS))
    out = cache.attend(layer, torch.tensor([slot]), q, k, v)
    return q[0], out[0]


def newest(cache: KVCache, slot: int, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Key and value `[H, 1, D]` of the token that was attended last and not stepped over."""
    state, position = cache.state, int(cache.state.seen[slot])
    row = state.sink_rows + position % state.ring_rows
    return state.window_k[slot, layer, :, row, None].float(), state.window_v[slot, layer, :, row, None].float()


def with_newest(tokens: HeadTokens, k: Tensor, v: Tensor) -> HeadTokens:
    """`tokens` and a newest one in the window."""
    assert tokens.v is not None
    one = torch.ones(HEADS, 1, dtype=torch.int64)
    return HeadTokens(
        torch.cat([tokens.k, k], 1),
        torch.cat([tokens.v, v], 1),
        torch.cat([tokens.position, one << 30], 1),
        torch.cat([tokens.tier, one.to(torch.int8) * IN_WINDOW], 1),
        torch.cat([tokens.index, one], 1),
        torch.cat([tokens.score, one.float() * 0], 1),
        torch.cat([tokens.votes, one.int() * 0], 1),
        torch.cat([tokens.weight, one.float() * 0], 1),
    )


def skip_some(cache: KVCache, slot: int, generator: torch.Generator) -> tuple[HeadTokens, Tensor]:
    """Skip pages of layer 0; returns its tokens and which of them attention sees."""
    tokens = cache.tokens(0, slot, values=True)
    selected = some(tokens, generator, 0.03)
    cache.skip_pages(0, slot, tokens, selected)
    cache.check_integrity()
    seen = torch.ones_like(selected)
    for tier, layout in enumerate(cache.spec.layouts):
        for head in range(HEADS):
            length = int(cache.state.lengths[slot, 0, head, tier])
            for page in range(length // layout.tokens):
                mine = (tokens.tier[head] == tier) & (tokens.index[head] // layout.tokens == page)
                if not bool((mine & selected[head]).any()):
                    seen[head] &= ~mine
    return tokens, seen


def merge_some(cache: KVCache, slot: int, generator: torch.Generator, target: int) -> HeadTokens:
    """Rewrite layer 0 with half of its tokens, a third of these with new contents; returns what stands there now."""
    tokens = cache.tokens(0, slot)
    shape = tokens.position.shape
    merged = {
        "changed": some(tokens, generator, 0.3),
        "k": torch.randn(*shape, DIM, generator=generator),
        "v": torch.randn(*shape, DIM, generator=generator),
        "weight": torch.randn(shape, generator=generator) * 2,
        "score": torch.rand(shape, generator=generator) * 0.1,
    }
    keep = some(tokens, generator, 0.5)
    cache.rewrite(0, slot, tokens, keep, target, merged)
    now = cache.tokens(0, slot, values=True)
    assert now.v is not None
    tolerance = {"rtol": 0, "atol": 0} if target == 0 else {"rtol": 0.02, "atol": 0.3}
    for head in range(HEADS):
        there = keep[head] & (tokens.tier[head] >= 0)
        here = now.tier[head] >= 0
        assert torch.equal(now.position[head][here], tokens.position[head][there])
        changed = merged["changed"][head][there]
        assert torch.equal(now.weight[head][here][changed], merged["weight"][head][there][changed])
        assert bool((now.weight[head][here][~changed] == 0).all())
        torch.testing.assert_close(
            now.score[head][here][changed], merged["score"][head][there][changed], rtol=1e-3, atol=0
        )
        for held, new in ((now.k, merged["k"]), (now.v, merged["v"])):
            torch.testing.assert_close(held[head][here][changed], new[head][there][changed], **tolerance)
    return now
