"""When a prompt may start beside others that will grow."""

from __future__ import annotations

from siftkv import LLM, SamplingParams
from siftkv.engine.sequence import Sequence
from tests.tiny import prompt, tiny_llm


def tight_pool(admission: str, pages: int = 40) -> LLM:
    roomy = tiny_llm("full:window=8", max_model_len=200)
    fixed = roomy.cache.usage().allocated - roomy.cache.spec.num_pages * (roomy.cache.spec.page_bytes + 4)
    budget = fixed + pages * (roomy.cache.spec.page_bytes + 4)
    return tiny_llm("full:window=8", max_model_len=200, kv_cache_memory_bytes=budget, admission=admission)


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


def test_careful_admission_learns_that_answers_are_short() -> None:
    llm = tight_pool("careful")
    scheduler = llm.engine.scheduler
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    assert not scheduler._fits_at_its_end(*queued(llm, long))
    llm.generate([prompt(20)] * 30, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert scheduler._fits_at_its_end(*queued(llm, long))


def queued(llm: LLM, params: SamplingParams) -> tuple[Sequence, list[Sequence]]:
    """Two sequences that were never admitted: one, and what runs beside it."""
    first, second = (llm.engine.add(prompt(60, i), params, llm.kv) for i in range(2))
    found = llm.engine.sequences(first)[0], llm.engine.sequences(second)
    for request in (first, second):
        llm.engine.abort(request)
        llm.engine.forget(request)
    return found
