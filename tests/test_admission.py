"""When a prompt may start beside others that will grow."""

from __future__ import annotations

import pytest

from siftkv import LLM, SamplingParams
from siftkv.engine.sequence import Sequence
from tests.tiny import prompt, tiny_llm


def tight_pool(admission: str, pages: int = 40, **settings: object) -> LLM:
    roomy = tiny_llm("full:window=8", max_model_len=200)
    fixed = roomy.cache.usage().allocated - roomy.cache.spec.num_pages * (roomy.cache.spec.page_bytes + 4)
    budget = fixed + pages * (roomy.cache.spec.page_bytes + 4)
    return tiny_llm("full:window=8", max_model_len=200, kv_cache_memory_bytes=budget, admission=admission, **settings)


def test_careful_admission_leaves_room_to_grow() -> None:
    """What a greedy start pays for with preemptions, a careful one need not; the answers are the same."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [prompt(60, seed) for seed in range(6)]
    answers, preemptions = {}, {}
    for admission in ("greedy", "careful"):
        outs = tight_pool(admission).generate(prompts, params)
        answers[admission] = [out.token_ids for out in outs]
        preemptions[admission] = sum(out.metrics.preemptions for out in outs)
    assert answers["greedy"] == answers["careful"]
    assert preemptions["greedy"] > 0
    assert preemptions["careful"] == 0


LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


def test_careful_admission_learns_that_answers_are_short() -> None:
    llm = tight_pool("careful")
    scheduler = llm.engine.scheduler
    assert not scheduler._fits_until_it_ends(*queued(llm, LONG))
    stops_at_once = SamplingParams(temperature=0, max_tokens=4, stop_token_ids=list(range(97)))
    llm.generate([prompt(20)] * 30, stops_at_once)
    assert scheduler._fits_until_it_ends(*queued(llm, LONG))


def test_answers_cut_at_a_low_limit_do_not_make_later_ones_short() -> None:
    llm = tight_pool("careful")
    llm.generate([prompt(20)] * 30, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert not llm.engine.scheduler._fits_until_it_ends(*queued(llm, LONG))


def test_the_forecast_is_the_fullest_moment_of_steady_growth() -> None:
    """Beside a request that ends soon, a long one needs less than both would at their ends."""
    llm = tight_pool("careful", pages=400)
    forecast = llm.engine.scheduler.forecast
    brief, long = (queued(llm, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))[0] for n in (10, 100))
    alone = [forecast.peak_pages([s]) for s in (brief, long)]
    together = forecast.peak_pages([brief, long])
    assert max(alone) <= together < sum(alone)
    walked = max(
        sum(forecast._worst_pages(s, now) for s, length in ((brief, 10), (long, 100)) if now <= length)
        for now in range(101)
    )
    assert abs(together - walked) <= 2 * llm.cache.spec.head_slots
    assert forecast.peak_pages([brief, brief]) == 2 * alone[0]


@pytest.mark.parametrize(("preemption", "together"), [("swap", 4), ("recompute", 3)])
def test_where_swapping_is_cheap_a_little_more_is_started(preemption: str, together: int) -> None:
    """Four requests would outgrow the pool by less than a twentieth: one of them waits in host memory for the end."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompts = [prompt(60, seed) for seed in range(4)]
    roomy = tight_pool("careful", pages=2000)
    ids = [roomy.engine.add(p, params, roomy.kv) for p in prompts]
    needed = roomy.engine.scheduler.forecast.peak_pages([roomy.engine.sequences(i)[0] for i in ids])
    expected = [out.token_ids for out in tight_pool("careful", pages=2000).generate(prompts, params)]
    llm = tight_pool("careful", pages=int(needed / 1.03), preemption=preemption)
    for p in prompts:
        llm.engine.add(p, params, llm.kv)
    found: dict[str, list[int]] = {}
    llm.engine.step()
    assert len(llm.engine.scheduler.running) == together
    while llm.engine.has_work:
        for chunk in llm.engine.step():
            if chunk.output is not None:
                found[chunk.request_id] = chunk.output.token_ids
    assert [found[i] for i in sorted(found, key=lambda name: int(name.split("-")[1]))] == expected


def queued(llm: LLM, params: SamplingParams) -> tuple[Sequence, list[Sequence]]:
    """Two sequences that were never admitted: one, and what runs beside it."""
    first, second = (llm.engine.add(prompt(60, i), params, llm.kv) for i in range(2))
    found = llm.engine.sequences(first)[0], llm.engine.sequences(second)
    for request in (first, second):
        llm.engine.abort(request)
        llm.engine.forget(request)
    return found
