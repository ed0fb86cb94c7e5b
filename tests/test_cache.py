"""The cache: pages, tables, windows, accounting, and thousands of random schedules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siftkv.cache import KVCache
from siftkv.cache.integrity import check_integrity
from siftkv.engine.sizing import planned_bytes
from siftkv.errors import FormatError, IntegrityError, NumericsError, OutOfPages, RequestError
from siftkv.policies import DecodeRule
from tests.tiny import ThreeTiers, random_prompt, random_step, small_cache

POLICIES = [
    "diffkv:window=8,sinks=2,alpha_high=1.5,alpha_low=0.7,interval=1,catch_up=1",
    "uniform:k8v4,window=5,sinks=0",
    "full:window=4",
]


@pytest.fixture(params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q `[Hq, D]`, k, v `[n, H, D]` to `[Hq, D]`."""
    query = q.view(k.shape[1], -1, k.shape[2])
    p = torch.softmax(torch.einsum("hgd,nhd->hgn", query, k) / k.shape[2] ** 0.5, -1)
    return torch.einsum("hgn,nhd->hgd", p, v).reshape(q.shape)


def test_full_cache_attends_exactly(kernels: str) -> None:
    cache, [full] = small_cache(["full:window=4"], kernels=kernels)
    generator = torch.Generator().manual_seed(0)
    slots = [cache.admit(full.rule) for _ in range(2)]
    history = [random_prompt(cache, full, slot, n, generator) for slot, n in zip(slots, (1, 23))]
    for _ in range(40):
        for layer, (q, k, v, out) in enumerate(random_step(cache, slots, generator)):
            for row in range(2):
                keys, values = history[row][layer]
                keys, values = torch.cat([keys, k[row : row + 1]]), torch.cat([values, v[row : row + 1]])
                history[row][layer] = (keys, values)
                torch.testing.assert_close(out[row], dense_attention(q[row], keys, values), rtol=1e-4, atol=1e-5)
        cache.check_integrity()


@pytest.mark.parametrize("bias", [0.0, 8.0])
def test_conditioning_is_exact(bias: float, kernels: str) -> None:
    """With 8-bit keys the conditioned cache answers like the plain one: the bias term and the rotation cancel."""
    outs = []
    for conditioning in ("full", "none"):
        cache, [policy] = small_cache(
            ["uniform:k8v8,window=4,sinks=1"], bias=bias, conditioning=conditioning, kernels=kernels
        )
        generator = torch.Generator().manual_seed(5)
        slot = cache.admit(policy.rule)
        random_prompt(cache, policy, slot, 60, generator)
        outs.append(torch.stack([x[3] for _ in range(12) for x in random_step(cache, [slot], generator)]))
    assert cache.state.conditioning.has_bias is False
    assert (outs[0] - outs[1]).norm() / outs[1].norm() < (0.05 if bias else 0.02)


def test_a_batch_mate_changes_nothing(kernels: str) -> None:
    def run(with_mates: bool) -> tuple[torch.Tensor, torch.Tensor]:
        cache, bound = small_cache(POLICIES, kernels=kernels)
        slot = cache.admit(bound[0].rule)
        random_prompt(cache, bound[0], slot, 70, torch.Generator().manual_seed(1))
        slots = [slot]
        for i, policy in enumerate(bound[1:] if with_mates else []):
            slots.append(cache.admit(policy.rule))
            random_prompt(cache, policy, slots[-1], 30 + i, torch.Generator().manual_seed(9 + i))
        outs = []
        generator = torch.Generator().manual_seed(2)
        for _ in range(30):
            spec, index = cache.spec, torch.tensor(slots)
            for layer in range(spec.num_layers):
                own = [torch.randn(1, h, spec.head_dim, generator=generator) for h in (4, 2, 2)]
                q, k, v = (torch.cat([x, torch.randn(len(slots) - 1, *x.shape[1:])]) for x in own)
                outs.append(cache.attend(layer, index, q, k, v)[0])
            cache.step(index)
        return torch.stack(outs), cache.state.lengths[slot].clone()

    (alone, lengths_alone), (together, lengths_together) = run(False), run(True)
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)
    assert torch.equal(lengths_alone, lengths_together)


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


def test_release_returns_everything(kernels: str) -> None:
    cache, bound = small_cache(POLICIES, kernels=kernels)
    generator = torch.Generator().manual_seed(0)
    slots = [cache.admit(p.rule) for p in bound]
    for policy, slot in zip(bound, slots):
        random_prompt(cache, policy, slot, 90, generator)
    assert cache.free_pages < cache.spec.num_pages
    cache.release(slots)
    cache.check_integrity()
    assert cache.free_pages == cache.spec.num_pages
    assert cache.free_slots == cache.spec.max_slots


def test_swap_is_bit_exact(kernels: str) -> None:
    def run(swap: bool) -> torch.Tensor:
        cache, bound = small_cache(POLICIES, kernels=kernels)
        generator = torch.Generator().manual_seed(0)
        slot = cache.admit(bound[0].rule)
        random_prompt(cache, bound[0], slot, 77, generator)
        outs = []
        for step in range(30):
            if swap and step % 7 == 3:
                swapped = cache.swap_out(slot)
                cache.check_integrity()
                other = cache.admit(bound[1].rule)
                random_prompt(cache, bound[1], other, 50, torch.Generator().manual_seed(99))
                slot = cache.swap_in(swapped)
                cache.release([other])
                cache.check_integrity()
            outs += [x[3] for x in random_step(cache, [slot], generator)]
        return torch.stack(outs)

    assert torch.equal(run(False), run(True))


def test_planned_bytes_equal_allocated() -> None:
    for kv in (POLICIES, ["uniform:k4v2c,window=8"], ["full:window=8"]):
        cache, _ = small_cache(kv, bias=4.0)
        assert planned_bytes(cache.spec, cache.state.conditioning) == cache.usage().allocated
        usage = cache.usage()
        assert usage.pool + usage.slots + usage.shared == usage.allocated


def test_request_bytes_add_up_to_the_cache() -> None:
    cache, bound = small_cache(POLICIES)
    generator = torch.Generator().manual_seed(0)
    slots = [cache.admit(p.rule) for p in bound]
    for policy, slot in zip(bound, slots):
        random_prompt(cache, policy, slot, 60, generator)
    held = int(cache.pages_held(torch.tensor(slots)).sum())
    assert held == cache.usage().pages_used
    sides = cache.usage().slots // cache.spec.max_slots
    assert (
        int(cache.request_bytes(torch.tensor(slots)).sum()) == held * (cache.spec.page_bytes + 4) + len(slots) * sides
    )


def test_prompt_without_pages_takes_nothing() -> None:
    cache, [policy] = small_cache(["uniform:k8v4,window=4"], num_pages=3)
    slot = cache.admit(policy.rule)
    with pytest.raises(OutOfPages, match="pages"):
        random_prompt(cache, policy, slot, 200, torch.Generator().manual_seed(0))
    assert cache.free_pages == 3
    cache.release([slot])
    cache.check_integrity()


def test_decode_without_pages_waits_in_the_window() -> None:
    cache, [policy] = small_cache(["full:window=4"], num_pages=4, page_bytes=1024)
    generator = torch.Generator().manual_seed(0)
    slot = cache.admit(policy.rule)
    random_prompt(cache, policy, slot, 10, generator)
    assert cache.free_pages == 0
    kept = cache.state.lengths[slot].clone()
    waited = 0
    index = torch.tensor([slot])
    for _ in range(8):
        for layer in range(cache.spec.num_layers):
            cache.attend(layer, index, torch.randn(1, 4, 16), torch.randn(1, 2, 16), torch.randn(1, 2, 16))
        waited += int(not cache.step(index)[0])
        cache.check_integrity()
    assert waited > 0
    assert bool((cache.state.lengths[slot] >= kept).all())
    cache.release([slot])
    cache.check_integrity()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_in_a_prompt_is_named(bad: float) -> None:
    cache, [policy] = small_cache(["uniform:k8v4,window=8"])
    slot = cache.admit(policy.rule)
    k = torch.randn(20, 2, 16)
    k[3, 1, 2] = bad
    with pytest.raises(NumericsError, match="layer 0"):
        cache.store_prompt(0, slot, k, torch.randn(20, 2, 16), torch.zeros(2, 20), torch.zeros(2, 20, dtype=torch.int8))


def test_bad_rules_are_refused() -> None:
    cache, [policy] = small_cache(["uniform:k8v4,window=8"])
    rule = policy.rule
    with pytest.raises(RequestError, match="window"):
        cache.admit(type(rule)(64, 0, rule.alpha, rule.cap))
    with pytest.raises(FormatError, match="k8v4"):
        cache.spec.tier_index(small_cache(["uniform:k4v2,window=8"])[0].spec.tiers[0])


def test_integrity_sees_each_fault() -> None:
    def fresh() -> KVCache:
        cache, [policy] = small_cache(["uniform:k8v4,window=4"])
        random_prompt(cache, policy, cache.admit(policy.rule), 60, torch.Generator().manual_seed(0))
        cache.check_integrity()
        return cache

    cache = fresh()
    cache.state.page_table[0, 0, 0, 0, 0] = cache.state.page_table[0, 1, 1, 0, 0]
    with pytest.raises(IntegrityError, match="more than once"):
        check_integrity(cache.state)
    cache = fresh()
    cache.state.page_table[0, 0, 0, 0, 0] = -1
    with pytest.raises(IntegrityError, match="leaked"):
        check_integrity(cache.state)
    cache = fresh()
    cache.state.lengths[0, 0, 0, 0] += cache.spec.layouts[0].tokens
    with pytest.raises(IntegrityError):
        check_integrity(cache.state)
    cache = fresh()
    cache.state.counters[1] += 1
    with pytest.raises(IntegrityError):
        check_integrity(cache.state)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "step", "step", "step", "finish", "swap"]),
        st.integers(0, 2),
        st.integers(1, 60),
        st.integers(0, 3),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 1000), pages=st.sampled_from([25, 60, 300]))
def test_random_schedules_keep_integrity(actions: list[tuple[str, int, int, int]], seed: int, pages: int) -> None:
    """Admit, step, finish, abort half-way and swap in any order, with pages short or plenty: nothing leaks."""
    cache, bound = small_cache(POLICIES, num_pages=pages, max_slots=3, max_len=512)
    generator = torch.Generator().manual_seed(seed)
    live: list[int] = []
    swapped = []
    for action, which, length, choice in actions:
        if action == "admit" and cache.free_slots:
            slot = cache.admit(bound[which].rule)
            try:
                random_prompt(cache, bound[which], slot, length, generator)
                live.append(slot)
            except OutOfPages:
                cache.release([slot])
        elif action == "step" and live and cache.step_page_bound(torch.tensor(live)) <= cache.free_pages:
            random_step(cache, live, generator)
        elif action == "finish" and live:
            cache.release([live.pop(choice % len(live))])
        elif action == "swap":
            if live:
                swapped.append(cache.swap_out(live.pop(choice % len(live))))
            elif swapped and cache.free_slots and swapped[0].num_pages <= cache.free_pages:
                live.append(cache.swap_in(swapped.pop(0)))
        cache.check_integrity()
    cache.release(live)
    cache.check_integrity()
    assert cache.free_pages == pages
