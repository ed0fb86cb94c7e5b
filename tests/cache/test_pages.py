"""Pages and bytes: given back, copied out and in, counted, and what happens when there are none."""

from __future__ import annotations

import pytest
import torch

from siftkv.engine.sizing import planned_bytes
from siftkv.errors import FormatError, NumericsError, OutOfPages, RequestError
from tests.cache.helpers import POLICIES
from tests.tiny import random_prompt, random_step, small_cache


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
