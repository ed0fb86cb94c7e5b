"""Attention after a trigger equals attention over the same tokens, masked: what a rewrite moves, it does not change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from siftkv.cache import KVCache
from siftkv.engine.binding import BoundPolicy
from siftkv.engine.cascade import Cascade
from siftkv.engine.triggers import Trigger
from siftkv.policies import HardKV, parse_policy
from tests.tiny import random_prompt, random_step, small_cache

KV = "hardkv:p=0.3,window=8,sinks=2,lower=16,upper=1000,interval=8,queries=4"
LENGTH = 120


def filled(kernels: str = "reference") -> tuple[KVCache, BoundPolicy, HardKV, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A request of 120 random tokens, all of them kept, with queries that look at some."""
    generator = torch.Generator().manual_seed(5)
    policy = parse_policy(KV)
    assert isinstance(policy, HardKV)
    cache, [bound] = small_cache([policy], kernels=kernels)
    slot = cache.admit(bound.rule)
    stored = random_prompt(cache, bound, slot, LENGTH, generator)
    for layer in range(2):
        q = torch.randn(LENGTH, 4, 16, generator=generator) * 2
        cache.store_queries(layer, cache.ring_places([(slot, 0, LENGTH)]), q)
    return cache, bound, policy, stored


def trigger(cache: KVCache, bound: BoundPolicy, policy: HardKV) -> Trigger:
    """What one trigger of a request that has generated all but its first token does."""
    cascade = Cascade(bound, policy, cache.spec, [1], 0)
    cascade.run(cache, 0, LENGTH)
    cache.check_integrity()
    return cascade.history[0]


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Attention of q `[Hq, D]` over k, v `[n, H, D]` where keep `[H, n]`: `[Hq, D]`."""
    grouped = q.unflatten(0, (keep.shape[0], -1))
    logits = torch.einsum("hgd,nhd->hgn", grouped, k) * q.shape[-1] ** -0.5
    weight = logits.masked_fill(~keep[:, None], -torch.inf).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", weight, v).flatten(0, 1)


@pytest.mark.parametrize("kernels", ["reference", "numba"])
def test_a_rewritten_cache_attends_as_a_masked_one(kernels: str) -> None:
    cache, bound, policy, stored = filled(kernels)
    done = trigger(cache, bound, replace(policy, upper=32))
    assert done.rewritten
    assert int(done.kept.max()) < LENGTH
    generator = torch.Generator().manual_seed(6)
    for layer, (q, k, v, out) in enumerate(random_step(cache, [0], generator, step=False)):
        position = cache.tokens(layer, 0).position
        keep = torch.zeros(2, LENGTH + 1, dtype=torch.bool)
        for head in range(2):
            kept = position[head][position[head] >= 0]
            assert (kept.diff() > 0).all()
            assert len(kept) == int(done.kept[layer, head])
            keep[head, kept] = True
        keep[:, LENGTH] = True  # the new token
        all_k, all_v = (torch.cat([old, new]) for old, new in zip(stored[layer], (k, v), strict=True))
        torch.testing.assert_close(out[0], masked(q[0], all_k, all_v, keep), rtol=1e-4, atol=1e-5)


def test_votes_survive_a_rewrite() -> None:
    cache, bound, policy, _ = filled()
    assert not trigger(cache, bound, policy).rewritten
    before = cache.tokens(0, 0)
    assert before.votes.max() > 1
    trigger(cache, bound, replace(policy, upper=32, p=0.01, memory=True))
    after = cache.tokens(0, 0)
    for head in range(2):
        was = dict(zip(before.position[head].tolist(), before.votes[head].tolist(), strict=True))
        now = dict(zip(after.position[head].tolist(), after.votes[head].tolist(), strict=True))
        now.pop(-1, None)
        assert all(votes >= was[position] for position, votes in now.items())
        gone = set(was) - set(now)
        assert gone
        assert not any(was[position] for position in gone)  # a vote of the first trigger held every other
