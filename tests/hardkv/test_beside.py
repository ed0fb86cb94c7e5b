"""Selections beside decode steps: the same answers however long they take, and no pages given back under them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from siftkv import LLM
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.policies import parse_policy
from tests.hardkv.layerwise import FakeLane, LayerwiseKernels
from tests.hardkv.requests import FULL, KV, cascade, greedy, llm_of, run, tight, with_setting
from tests.tiny import prompt

SETTINGS = pytest.mark.parametrize(
    "setting", ["budget=24", "format=k8v4", "metric=accumulated,refresh=1", "interval=1"]
)


def fused(kv: str, late: bool, **settings: Any) -> tuple[LLM, FakeLane]:
    llm = llm_of(kv, **settings)
    llm.cache.kernels = LayerwiseKernels()
    lane = llm.cache.state.scratch["selections"] = FakeLane(late)
    return llm, lane


def outcome(llm: LLM, prompts: list[list[int]], kv: list[str], tokens: int = 40) -> list[Any]:
    outs = run(llm, prompts, tokens, kv)
    found = []
    for i, out in enumerate(outs):
        assert out.kv is not None
        [sequence] = llm.engine.sequences(f"r{i}")
        history = sequence.cascade.history if sequence.cascade else []
        found.append((out.token_ids, out.kv.per_head_tokens, [t.to_dict() for t in history]))
    return found


def counts(history: list[dict[str, Any]]) -> list[Any]:
    """What a batch does not change in the last bits."""
    return [[t[name] for name in ("position", "rewritten", "deferred", "selected", "kept")] for t in history]


@SETTINGS
def test_how_long_a_selection_takes_changes_nothing(setting: str) -> None:
    kv = with_setting(setting)
    prompts, mixed = [prompt(n, n) for n in (50, 20, 35)], [kv, FULL, kv]
    early, lane = fused(kv, False, formats=["bf16"])
    late, slow = fused(kv, True, formats=["bf16"])
    expected = outcome(early, prompts, mixed)
    assert outcome(late, prompts, mixed) == expected
    assert len(lane.jobs) == len(slow.jobs)
    assert len(lane.jobs) > 8 or "accumulated" in setting
    assert len(expected[0][2]) > 3
    alone, _ = fused(kv, True, formats=["bf16"])
    [(ids, tokens, history)] = outcome(alone, prompts[:1], [kv])
    assert (ids, tokens) == expected[0][:2]
    assert counts(history) == counts(expected[0][2])


def test_a_selection_is_applied_at_the_next_step() -> None:
    llm, lane = fused(KV, True)
    llm.engine.add(prompt(50), greedy(40), llm.kv, request_id="r0")
    [sequence] = llm.engine.sequences("r0")
    triggers = cascade(llm)
    while sequence.finish_reason is None:
        started, applied, fed = len(lane.jobs), len(triggers.history), sequence.seen
        llm.engine.step()
        if len(lane.jobs) > started:
            assert len(triggers.history) == applied
            assert lane.jobs[started].work is not None
            llm.engine.step()
            assert lane.jobs[started].work is None
            assert triggers.history[-1].position == fed
            assert int(triggers.history[-1].kept.max()) <= fed + 1
    assert len(triggers.history) > 3


def test_tokens_that_came_meanwhile_stay() -> None:
    llm, _ = fused(KV, True)
    llm.engine.add(prompt(50), greedy(40), parse_policy(KV.replace("p=0.4", "p=0.05")), request_id="r0")
    [sequence] = llm.engine.sequences("r0")
    triggers = cascade(llm)
    while len(triggers.history) < 3:
        llm.engine.step()
    trigger = triggers.history[-1]
    newest = trigger.position - 8  # leaves the window of 8 in the step beside the selection
    for layer in range(llm.cache.spec.num_layers):
        tokens = llm.cache.tokens(layer, sequence.slot)
        assert (tokens.position == newest).any(-1).all()
    assert torch.equal(trigger.kept, trigger.selected + 1)
    llm.engine.abort("r0")


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_preempted_request_ends_as_an_undisturbed_one(preemption: str) -> None:
    kv = with_setting("format=k8v4")
    prompts = [prompt(12, i) for i in range(3)]
    roomy, _ = fused(kv, False)
    expected = []
    for own in prompts:
        expected += outcome(roomy, [own], [kv], 60)
        roomy.engine.forget("r0")
    llm, lane = fused(kv, True, kv_cache_memory_bytes=tight(roomy, 18), preemption=preemption)
    found = outcome(llm, prompts, [kv] * 3, 60)
    assert sum(llm.engine.sequences(f"r{i}")[0].preemptions for i in range(3)) > 0
    assert [(x[:2], counts(x[2])) for x in found] == [(x[:2], counts(x[2])) for x in expected]
    assert lane.open == 0


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_request_preempted_during_a_selection_is_joined_first(preemption: str) -> None:
    llm, lane = fused(KV, True, preemption=preemption)
    expected = outcome(fused(KV, False)[0], [prompt(50)], [KV])
    llm.engine.add(prompt(50), greedy(40), llm.kv, request_id="r0")
    [sequence] = llm.engine.sequences("r0")
    for count in (1, 3, 4):
        while len(cascade(llm).history) + 1 < count or not lane.open:
            llm.engine.step()
        llm.engine.scheduler.running.remove(sequence)
        llm.engine.scheduler._preempt(sequence)
        assert lane.open == 0
        assert llm.cache.free_pages == llm.cache.spec.num_pages
        llm.engine.step()
    while llm.engine.has_work:
        llm.engine.step()
    assert sequence.preemptions == 3
    assert sequence.kv is not None
    history = [t.to_dict() for t in cascade(llm).history]
    assert [(sequence.output_ids, sequence.kv.per_head_tokens, history)] == expected


def test_an_abort_during_a_selection_waits_for_it_and_gives_everything_back() -> None:
    llm, lane = fused(KV, True)
    for count in range(1, 5):
        llm.engine.add(prompt(50), greedy(60), llm.kv, request_id="r0")
        while len(cascade(llm).history) + 1 < count or not lane.open:
            llm.engine.step()
        llm.engine.abort("r0")
        assert lane.open == 0
        assert not llm.cache.under_way
        assert llm.cache.free_pages == llm.cache.spec.num_pages
        llm.engine.forget("r0")


def test_a_request_may_end_during_a_selection() -> None:
    for tokens in range(1, 11):
        llm, lane = fused(KV, True)
        run(llm, [prompt(50)], tokens, [KV])
        assert lane.open == 0


def test_teacher_forcing_lags_like_generation() -> None:
    llm, lane = fused(KV, True)
    [(ids, _, history)] = outcome(llm, [prompt(60, 3)], [KV])
    forced = ForcedRun(llm.engine, [ForcedRow(prompt(60, 3), ids[:-1], llm.kv)])
    assert [int(logits[0].argmax()) for logits in forced] == ids[1:]
    assert forced.cascades[0] is not None
    assert [t.to_dict() for t in forced.cascades[0].history] == history
    assert lane.open == 0
