"""Prompts that wait for others, so that one pass serves several."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from types import SimpleNamespace
from typing import Any

import pytest

from siftkv import LLM, SamplingParams
from siftkv.engine.gathering import _PATIENCE, Gathering
from tests.tiny import prompt, tiny_llm


def waiting(*priorities: int, **first: Any) -> list[Any]:
    rest = {"prefill_failures": 0, "output_ids": [], "prompt_ids": [0] * 100, "max_tokens": 500}
    found = [SimpleNamespace(params=SimpleNamespace(priority=p), **rest) for p in priorities]
    vars(found[0]).update(first)
    return found


def after(steps: int, active: bool = True) -> Gathering:
    gathering = Gathering(active, 2000)
    gathering.started()
    for _ in range(steps):
        gathering.stepped()
    return gathering


def test_an_eighth_of_what_runs_starts_together() -> None:
    assert after(1).wanted(waiting(*[0] * 20), 64) == 8
    assert after(1).wanted(waiting(0, 0, 0), 64) == 2, "half of them"
    assert [after(1).wanted(waiting(*[0] * 20), n) for n in (7, 8, 15, 16, 39, 40)] == [1, 2, 3, 4, 4, 5]
    assert after(1, active=False).wanted(waiting(*[0] * 20), 64) == 1


def test_no_more_than_a_pass_takes() -> None:
    """Who is left over would have a pass of its own."""
    assert after(1).wanted(waiting(*[0] * 80), 400) == 20
    assert after(1).wanted(waiting(*[0] * 20, prompt_ids=[0] * 2100), 64) == 1


def test_nobody_is_held_for_long() -> None:
    many = waiting(*[0] * 20)
    assert after(0).wanted(many, 64) == 8
    assert after(_PATIENCE - 1).wanted(many, 64) == 8
    assert after(_PATIENCE).wanted(many, 64) == 1
    short = waiting(*[0] * 20, max_tokens=3)
    assert [after(steps).wanted(short, 64) for steps in (2, 3)] == [8, 1], "no longer than the answer may be"


@pytest.mark.parametrize("first", [{"prefill_failures": 1}, {"output_ids": [5]}])
def test_who_has_waited_before_is_not_held(first: dict[str, Any]) -> None:
    assert after(1).wanted(waiting(*[0] * 20, **first), 64) == 1


def test_the_more_urgent_is_not_held_for_the_less_urgent() -> None:
    assert after(1).wanted(waiting(-1, *[0] * 19), 64) == 1
    assert after(1).wanted(waiting(*[-1] * 8, *[0] * 12), 64) == 8


def gathering_llm(slots: int, active: bool) -> LLM:
    llm = tiny_llm("uniform:k8v8,window=8", max_num_seqs=slots, max_model_len=200, check_integrity=False)
    llm.engine.scheduler.gathering = Gathering(active, 8192)
    return llm


def passes(llm: LLM, lengths: SequenceOf[int]) -> tuple[list[int], dict[str, list[int]]]:
    """Prompts of each pass, and answers by request, where answers have these lengths."""
    engine, found, answers = llm.engine, [], {}
    for i, n in enumerate(lengths):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        engine.add(prompt(30 + i % 5, seed=i), params, llm.kv, request_id=f"{i}")
    while engine.has_work:
        waiting = len(engine.scheduler.waiting)
        for chunk in engine.step():
            if chunk.output is not None:
                answers[chunk.request_id] = chunk.output.token_ids
        found += [waiting - len(engine.scheduler.waiting)] * (len(engine.scheduler.waiting) < waiting)
    return found, answers


def test_a_full_engine_starts_several_at_once_and_says_the_same() -> None:
    lengths = [10 + i * 37 % 61 for i in range(64)]
    (single, expected), (together, answers) = (passes(gathering_llm(24, active), lengths) for active in (False, True))
    assert answers == expected
    assert sum(single) == sum(together) == 64
    assert len(together) < 0.6 * len(single)
    assert together.count(1) < 0.2 * single.count(1)


def test_a_prompt_is_held_for_few_steps() -> None:
    """One request ends early, the others go on: whoever is next has a slot, and none beside it."""
    llm = gathering_llm(9, True)
    steps, engine = 0, llm.engine
    for i, n in enumerate([4, *[100] * 8, 50, 50, 50]):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
        engine.add(prompt(30, seed=i), params, llm.kv, request_id=f"{i}")
    while engine.sequences("9")[0].slot < 0:
        engine.step()
        steps += 1
    assert _PATIENCE <= steps <= _PATIENCE + 2
    assert len(engine.scheduler.waiting) == 2


def test_short_answers_beside_long_ones_do_not_wait_for_slots_that_never_come() -> None:
    llm = gathering_llm(9, True)
    engine, calls = llm.engine, 0
    for i in range(8):
        engine.add(prompt(10, seed=i), SamplingParams(temperature=0, max_tokens=150, ignore_eos=True), llm.kv)
    engine.step()
    short = [engine.add(prompt(10, seed=i), SamplingParams(temperature=0, max_tokens=1), llm.kv) for i in range(20)]
    while any(engine.sequences(i)[0].finish_reason is None for i in short):
        engine.step()
        calls += 1
    assert calls <= 45, "one after the other through the only free slot, a step of the others between"
    assert len(engine.scheduler.running) == 8


def test_a_prompt_that_comes_to_a_free_place_starts_at_once() -> None:
    llm = gathering_llm(24, True)
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for i in range(20):
        engine.add(prompt(30, seed=i), params, llm.kv)
    for _ in range(4):
        engine.step()
    late = engine.add(prompt(30, seed=50), params, llm.kv)
    engine.step()
    assert len(engine.sequences(late)[0].output_ids) == 1
