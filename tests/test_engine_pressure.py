"""The engine when pages are short: preemption, swapping, what never fits."""

from __future__ import annotations

import logging

import pytest

from siftkv import SamplingParams
from siftkv.errors import OutOfPages
from tests.tiny import prompt, tiny_llm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

SIFTED = "diffkv:window=8,sinks=2,alpha_high=1.2,alpha_low=0.6,interval=2,catch_up=1"


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_equals_undisturbed(preemption: str) -> None:
    prompts = [prompt(60, i) for i in range(4)]
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=60, ignore_eos=True)
    roomy = tiny_llm("full:window=8").generate(prompts, params)
    llm = tiny_llm("full:window=8", preemption=preemption, kv_cache_memory_bytes=tight_memory("full:window=8", 70))
    tight = llm.generate(prompts, params)
    assert sum(o.metrics.preemptions for o in tight if o.metrics) > 0, "the pool was meant to run out"
    assert [o.token_ids for o in tight] == [o.token_ids for o in roomy]
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def tight_memory(kv: str, pages: int) -> int:
    cache = tiny_llm(kv).cache
    return cache.usage().allocated + (pages - cache.spec.num_pages) * (cache.spec.page_bytes + 4)


def test_memory_budget_is_kept() -> None:
    budget = 3_000_000
    llm = tiny_llm(kv_cache_memory_bytes=budget)
    assert budget - llm.cache.spec.page_bytes - 4 < llm.cache.usage().allocated <= budget


def test_prompt_longer_than_the_pool() -> None:
    llm = tiny_llm("full:window=8", kv_cache_memory_bytes=tight_memory("full:window=8", 12))
    with pytest.raises(OutOfPages, match="kv_cache_memory_bytes"):
        llm.generate([prompt(400)], GREEDY)
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert llm.generate([prompt(10)], GREEDY)[0].finish_reason == "length"


def test_answer_longer_than_the_pool_keeps_what_there_was() -> None:
    llm = tiny_llm("full:window=8", kv_cache_memory_bytes=tight_memory("full:window=8", 20))
    with pytest.raises(OutOfPages) as caught:
        llm.generate([prompt(10)], SamplingParams(max_tokens=400, ignore_eos=True))
    [output] = caught.value.outputs  # type: ignore[attr-defined]
    assert output.finish_reason == "abort"
    assert len(output.token_ids) > 20


def test_prompts_that_do_not_fit_together_run_one_after_another() -> None:
    prompts = [prompt(200, i) for i in range(3)]
    roomy = tiny_llm("uniform:k8v4,window=8").generate(prompts, GREEDY)
    llm = tiny_llm("uniform:k8v4,window=8", kv_cache_memory_bytes=tight_memory("uniform:k8v4,window=8", 40))
    assert [o.token_ids for o in llm.generate(prompts, GREEDY)] == [o.token_ids for o in roomy]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_tight_pool_with_two_tiers_always_gets_on(seed: int, preemption: str) -> None:
    """Part pages of every tier count in what a prompt may take; what does not fit now runs later, never for ever."""
    kv = "diffkv:window=8,sinks=2,alpha_high=1.0,alpha_low=0.0,interval=2"
    prompts = [prompt(40 + 30 * ((seed + i) % 4), i) for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    roomy = tiny_llm(kv).generate(prompts, params)
    llm = tiny_llm(kv, preemption=preemption, kv_cache_memory_bytes=tight_memory(kv, 26))
    ids = [llm.engine.add(p, params, llm.kv) for p in prompts]
    for _ in range(2000):
        if not llm.engine.has_work:
            break
        llm.engine.step()
    assert not llm.engine.has_work, "no progress"
    assert [llm.engine.sequences(i)[0].output_ids for i in ids] == [o.token_ids for o in roomy]
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_prompts_that_starve_each_other_run_alone() -> None:
    kv = "diffkv:window=8,sinks=2"
    llm = tiny_llm(kv, kv_cache_memory_bytes=tight_memory(kv, 14))
    out = llm.generate([prompt(60, i) for i in range(4)], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert all(len(o.token_ids) == 5 for o in out)


def test_swapped_bytes_stay_within_their_limit() -> None:
    limit = 150_000
    kv = "full:window=8"
    llm = tiny_llm(kv, kv_cache_memory_bytes=tight_memory(kv, 70), swap_space_bytes=limit)
    for i in range(4):
        llm.engine.add(prompt(60, i), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), llm.kv)
    most = 0
    while llm.engine.has_work:
        llm.engine.step()
        most = max(most, llm.engine.scheduler.swapped_bytes)
    assert 0 < most <= limit


def test_a_warning_where_slots_leave_little_for_pages(caplog: pytest.LogCaptureFixture) -> None:
    roomy = tiny_llm("full:window=8")
    fixed = roomy.cache.usage().allocated - roomy.cache.spec.num_pages * (roomy.cache.spec.page_bytes + 4)
    with caplog.at_level(logging.WARNING):
        tiny_llm("full:window=8", kv_cache_memory_bytes=int(2.1 * fixed))
        assert not caplog.messages
        tiny_llm("full:window=8", kv_cache_memory_bytes=int(1.6 * fixed))
    [message] = caplog.messages
    assert "take 6" in message
    assert "lower max_num_seqs" in message
