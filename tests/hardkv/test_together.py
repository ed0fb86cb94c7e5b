"""Selections over all layers and heads at once against those that go layer by layer, and beside decode steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from siftkv.cache import KVCache, compaction
from siftkv.cache.request_tokens import last_queries, request_tokens
from siftkv.engine.binding import BoundPolicy
from siftkv.engine.cascade import Cascade
from siftkv.engine.together import select_together
from siftkv.kernels.state import CacheState, SelectionRule
from siftkv.policies import HardKV, parse_policy
from siftkv.policies.hardkv.fit import fit
from siftkv.policies.hardkv.selection import coverage
from tests.hardkv.layerwise import FakeLane, LayerwiseKernels
from tests.hardkv.requests import llm_of, run, with_setting
from tests.hardkv.test_beside import outcome
from tests.tiny import prompt, random_prompt, small_cache

SETTINGS = (
    *("metric=attention", "metric=snapkv", "metric=rkv", "metric=accumulated", "metric=accumulated,queries=0"),
    *("budget=24", "budget=16KiB", "memory=true", "layout=max", "layout=max,format=k8v4", "group=max,format=k4v4"),
    *("select=topk,budget=24,metric=rkv", "select=topk,budget=30,format=k8v4", "p=1"),
)


class NoSelect(LayerwiseKernels):
    """Kernels that rewrite all layers at once and know no selection."""

    def selects(self, state: CacheState, rule: SelectionRule) -> bool:
        return False


def ragged(setting: str, length: int = 120) -> tuple[KVCache, BoundPolicy, HardKV, int]:
    """A request whose heads have lost different tokens, and of which some were rewritten in another format."""
    generator = torch.Generator().manual_seed(7)
    policy = parse_policy(with_setting(setting))
    assert isinstance(policy, HardKV)
    cache, [bound] = small_cache([with_setting(setting)], kernels="reference")
    slot = cache.admit(bound.rule)
    random_prompt(cache, bound, slot, length, generator)
    for layer in range(cache.spec.num_layers):
        if policy.queries:
            q = torch.randn(length, 4, 16, generator=generator) * 2
            cache.store_queries(layer, cache.ring_places([(slot, 0, length)]), q)
        tokens = cache.tokens(layer, slot)
        votes = torch.randint(0, 3, tokens.votes.shape, generator=generator).int() * (tokens.tier >= 0)
        cache.write_votes(layer, slot, tokens, votes)
        gone = torch.rand(tokens.tier.shape, generator=generator) < torch.tensor([[0.5], [0.1]])
        if layer == 0:
            cache.rewrite(layer, slot, tokens, ~gone, bound.pool_tiers[-1])
    return cache, bound, policy, slot


@pytest.mark.parametrize("setting", SETTINGS)
def test_it_keeps_what_a_trigger_keeps_that_goes_layer_by_layer(setting: str) -> None:
    (cache, bound, policy, slot), (other, *_) = ragged(setting), ragged(setting)
    cascade = Cascade(bound, policy, cache.spec, [1], 0)
    layers = [cascade._poll(other, layer, slot) for layer in range(2)]
    keep = fit(policy, [layer.ballot for layer in layers], cascade._most_tokens)
    sources = tuple(reversed(bound.pool_tiers))
    found = select_together(cache.state, slot, policy, sources, 120, cascade._most_tokens)
    for number, (layer, kept) in enumerate(zip(layers, keep, strict=True)):
        tokens = cache.tokens(number, slot)
        candidate = tokens.tier >= 0
        place = (candidate.cumsum(-1) - 1).clamp_min(0)
        assert torch.equal(candidate & (found.keep[number].gather(-1, place) > 0), kept)
        assert torch.equal(found.kept[number].long(), kept.sum(-1))
        assert torch.equal(tokens.votes, other.tokens(number, slot).votes)
        near = (tokens.position >= 0) & ~candidate
        torch.testing.assert_close(found.mass[number], coverage(layer.share, kept | near))
    assert int(found.kept.sum()) > 0
    assert policy.p == 1 or int(found.kept.min()) < 100
    cache.check_integrity()


def test_heads_taken_in_parts_are_as_heads_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (1 << 26, 1):
        monkeypatch.setattr("siftkv.engine.together._MOST_BYTES", most)
        cache, bound, policy, slot = ragged("layout=max,format=k8v4")
        found.append(select_together(cache.state, slot, policy, tuple(reversed(bound.pool_tiers)), 120, 2**31 - 1))
    for ours, theirs in zip(vars(found[0]).values(), vars(found[1]).values(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tokens_are_those_of_each_layer_in_order_of_time() -> None:
    cache, bound, _, slot = ragged("format=k8v4")
    found = request_tokens(cache.state, slot, slice(0, 4), tuple(reversed(bound.pool_tiers)), 110)
    queries, position = last_queries(cache.state, slot, slice(2, 4), 120)
    for layer in range(2):
        expected, own = cache.tokens(layer, slot), slice(2 * layer, 2 * layer + 2)
        count = expected.position.shape[1]
        for name in ("k", "position", "tier", "score", "votes", "weight"):
            torch.testing.assert_close(getattr(found, name)[own, :count], getattr(expected, name))
        assert (found.tier[own, count:] == compaction.PADDING).all()
    expected_q, expected_position = compaction.recent_queries(cache.state, 1, slot)
    assert torch.equal(queries, expected_q)
    assert torch.equal(position, expected_position)


def test_votes_stop_at_the_most_that_a_tier_counts() -> None:
    cache, bound, policy, slot = ragged("metric=attention")
    for layer in range(2):
        tokens = cache.tokens(layer, slot)
        cache.write_votes(layer, slot, tokens, torch.full_like(tokens.votes, 65534))
    before = cache.state.pages.clone()
    for _ in range(3):
        select_together(cache.state, slot, policy, bound.pool_tiers, 120, 2**31 - 1)
    after = [cache.tokens(layer, slot) for layer in range(2)]
    votes = torch.cat([t.votes[t.tier >= 0] for t in after])
    assert set(votes.tolist()) == {65534, 65535}
    for layer, tokens in enumerate(after):
        cache.write_votes(layer, slot, tokens, torch.full_like(tokens.votes, 65534))
    assert torch.equal(cache.state.pages, before)  # nothing else was written


@pytest.mark.parametrize("setting", ["metric=rkv", "select=topk,budget=24,metric=rkv", "layout=max", "memory=true"])
def test_how_long_a_selection_takes_changes_nothing(setting: str) -> None:
    kv, found = with_setting(setting), []
    for late in (False, True):
        llm = llm_of(kv)
        llm.cache.kernels = NoSelect()
        lane = llm.cache.state.scratch["selections"] = FakeLane(late)
        found.append(outcome(llm, [prompt(50), prompt(20), prompt(35)], [kv, "full:window=8", kv]))
        assert len(lane.jobs) > 8
        assert lane.open == 0
    assert found[0] == found[1]


def test_it_serves_as_kernels_do_that_select() -> None:
    kv, found = with_setting("budget=24,interval=4"), []
    for kernels in (LayerwiseKernels(), NoSelect()):
        llm = llm_of(kv, formats=["bf16"])
        llm.cache.kernels = kernels
        found.append([(out.token_ids, out.kv and out.kv.per_head_tokens) for out in run(llm, [prompt(50)], 40, [kv])])
    assert found[0] == found[1]


def test_what_it_cannot_do_goes_layer_by_layer() -> None:
    for setting in ("condense=merge", "calibrate=temperature", "sparse_loading=true"):
        cache, bound, policy, _ = ragged(setting)
        cache.kernels = NoSelect()
        assert Cascade(bound, policy, cache.spec, [1], 0)._rule(cache) is None
        plain = replace(policy, condense="evict", calibrate="rank", sparse_loading=False)
        assert Cascade(bound, plain, cache.spec, [1], 0)._rule(cache) is not None
