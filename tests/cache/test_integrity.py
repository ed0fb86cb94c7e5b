"""The bookkeeping: each fault is seen, and no schedule of requests brings one about."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siftkv.cache import KVCache
from siftkv.cache.integrity import check_integrity
from siftkv.errors import IntegrityError, OutOfPages
from tests.cache.helpers import POLICIES
from tests.tiny import random_prompt, random_step, small_cache


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
