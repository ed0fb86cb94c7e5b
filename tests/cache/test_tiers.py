"""Where tokens go while decoding: from tier to tier, by thresholds, caps and shares."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from siftkv.errors import RequestError
from siftkv.policies import DecodeRule
from tests.tiny import ThreeTiers, random_prompt, random_step, small_cache


def test_tokens_go_high_low_gone() -> None:
    cache, [policy] = small_cache(["diffkv:window=4,sinks=0,alpha_high=1,alpha_low=0.9,interval=1,catch_up=1"])
    generator = torch.Generator().manual_seed(3)
    slot = cache.admit(policy.rule)
    random_prompt(cache, policy, slot, 80, generator)
    before = cache.state.lengths[slot].sum()
    for _ in range(120):
        random_step(cache, [slot], generator)
        cache.check_integrity()
    stored = cache.state.lengths[slot].sum(-1)
    assert bool((stored < 200 - 4).all()), "some tokens were dropped"
    assert cache.state.lengths[slot].sum() != before
    assert bool((cache.state.lengths[slot] > 0).all()), "both tiers are used"


def test_alpha_low_zero_never_drops() -> None:
    cache, [policy] = small_cache(["diffkv:window=4,sinks=0,alpha_high=1,alpha_low=0,interval=1"])
    generator = torch.Generator().manual_seed(3)
    slot = cache.admit(policy.rule)
    random_prompt(cache, policy, slot, 50, generator)
    for _ in range(60):
        random_step(cache, [slot], generator)
    assert bool((cache.state.lengths[slot].sum(-1) == 110 - 4).all())


def test_three_quantised_tiers(kernels: str) -> None:
    """The cache is not built for two tiers: caps make what is displaced cascade through all of them, and out."""
    cache, [policy] = small_cache([ThreeTiers()], kernels=kernels)
    assert [t.name for t in cache.spec.tiers] == ["k8v4", "k4v4", "k4v2"]
    slot = cache.admit(policy.rule)
    generator = torch.Generator().manual_seed(0)
    random_prompt(cache, policy, slot, 30, generator)
    assert bool((cache.state.lengths[slot] == torch.tensor([9, 9, 8])).all())
    for _ in range(60):
        random_step(cache, [slot], generator)
        cache.check_integrity()
    assert bool((cache.state.lengths[slot] == torch.tensor([10, 12, 14])).all())
    cache.release([slot])
    cache.check_integrity()


def test_shares_grow_with_the_request_and_leave_with_it(kernels: str) -> None:
    """Caps of ten to fourteen tokens a tier and, in one head, pages for an eighth of the request in its first tier."""
    cache, [policy] = small_cache([ThreeTiers()], kernels=kernels)
    generator = torch.Generator().manual_seed(0)
    cap, tokens = policy.rule.cap.clone(), cache.spec.layouts[0].tokens
    cap[1, 1] = torch.tensor([100, 12, 14])
    slots = [cache.admit(policy.rule), cache.admit(replace(policy.rule, cap=cap))]
    for slot in slots:
        random_prompt(cache, policy, slot, 5, generator)
    share = torch.full((1, 2, 3), torch.inf)
    share[0, 1] = torch.tensor([0.125, 0.0, torch.inf])
    cache.set_shares(1, torch.tensor(slots[1:]), share)
    for seen in range(6, 125):
        index, held = torch.tensor(slots), cache.state.lengths[slots[1], 1, 1].clone()
        bound, free = cache.step_page_bound(index), cache.free_pages
        random_step(cache, slots, generator)
        assert free - cache.free_pages <= bound
        grown = (seen + 8 * tokens - 1) // (8 * tokens) * tokens
        assert held[0] <= cache.state.lengths[slots[1], 1, 1, 0] <= grown
        if seen == 60:
            slots[1] = cache.swap_in(cache.swap_out(slots[1]))
    cache.check_integrity()
    full = cache.state.lengths[slots[0], 0, 0].tolist()
    assert full == [10, 12, 14]
    assert cache.state.lengths[slots[1], 1, 1].tolist() == [-(-16 // tokens) * tokens, 0, 14]
    assert cache.state.lengths[slots[1], 0, 1].tolist() == full
    cache.release(slots)
    assert bool(torch.isinf(cache.state.cap_share[cache.admit(policy.rule)]).all())
    assert bool(torch.isinf(cache.state.cap_share[cache.admit(policy.rule)]).all())


def test_a_policy_says_shares_and_horizon() -> None:
    """The pool has more tiers than the policy: shares go where its own tiers stand."""

    class Growing(ThreeTiers):
        def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
            rule = super().decode_rule(num_layers, num_kv_heads)
            return replace(rule, share=torch.tensor([0.1, 0.2, 0.3]).expand(rule.cap.shape), horizon=256)

    cache, [policy, _] = small_cache([Growing(), "uniform:k8v8,window=4"])
    assert len(cache.spec.tiers) == 4
    slot = cache.admit(policy.rule)
    assert cache.state.cap_share[slot, 1, 0].tolist() == pytest.approx([math.inf, 0.1, 0.2, 0.3])
    assert int(cache.state.horizon[slot]) == 256
    for horizon in (0, -1, 2**31):
        with pytest.raises(RequestError, match="horizon"):
            cache.admit(replace(policy.rule, horizon=horizon))
