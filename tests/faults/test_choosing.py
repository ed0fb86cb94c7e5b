"""Errors while it is chosen who runs next: they end whom they concern, or those that were considered."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from siftkv import LLM
from siftkv.cache.rules import SlotRule
from siftkv.engine.cascade import Cascade
from siftkv.engine.forecast import Forecast
from siftkv.engine.sequence import Sequence, Status
from siftkv.errors import StepFailed
from siftkv.policies import parse_policy
from tests.faults.helpers import BAD, add, finish, first_time, four, in_a_tight_pool
from tests.hardkv.requests import FULL, KV, greedy, llm_of
from tests.test_pipeline import EagerGraphs
from tests.tiny import prompt


def told(sequence: Sequence) -> str:
    """Why it ended, after its name."""
    assert sequence.finish_reason == "abort"
    assert isinstance(sequence.error, StepFailed)
    return str(sequence.error).removeprefix(f"request {sequence.request_id}: ")


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_policy_that_is_asked_for_its_next_move_ends_its_request(
    overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    real, found = Cascade.moves, []
    for faulty in (False, True):
        llm = llm_of(KV, formats=["bf16"])
        if overlapping:
            llm.engine.runner.graphs = EagerGraphs(llm)  # type: ignore[assignment]
        good = [add(llm, "a", 40, KV), add(llm, "b", 25, FULL)]
        if faulty:
            bad = add(llm, BAD, 50, KV)

            def moves(self: Cascade, seen: int, own: Cascade | None = bad.cascade) -> bool:
                if self is own and seen >= 55:
                    raise KeyError("of its own")
                return real(self, seen)

            monkeypatch.setattr(Cascade, "moves", moves)
        finish(llm)
        assert all(s.error is None for s in good)
        found.append([(s.output_ids, s.kv and s.kv.per_head_tokens) for s in good])
    assert told(bad).endswith("failed: KeyError('of its own')")
    assert 4 <= len(bad.output_ids) <= 6
    assert found[0] == found[1]


def broken_for(name: str, real: Any) -> Any:
    """`Forecast._worst_pages` that raises for one request."""

    def called(self: Forecast, sequence: Sequence, output: int) -> int:
        if sequence.request_id == name:
            raise ZeroDivisionError("of its own")
        return int(real(self, sequence, output))

    return called


@pytest.mark.parametrize("admission", ["careful", "greedy"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_forecast_that_raises_ends_its_request(place: int, admission: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL, admission=admission)
    names = ["a", "b"]
    expected = [add(llm, name, 20 + i, FULL) for i, name in enumerate(names)]
    finish(llm)
    for name in names:
        llm.engine.forget(name)
    monkeypatch.setattr(Forecast, "_worst_pages", broken_for(BAD, Forecast._worst_pages))
    names.insert(place, BAD)
    sequences = {name: add(llm, name, 20 + "ab".find(name) % 3, FULL) for name in names}
    finish(llm)
    bad = sequences.pop(BAD)
    assert told(bad) == "choosing who runs next failed: ZeroDivisionError('of its own')"
    assert [s.output_ids for s in sequences.values()] == [s.output_ids for s in expected]


def test_a_forecast_that_raises_for_a_request_that_runs_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL, admission="careful")
    bad = add(llm, BAD, 20, FULL)
    for _ in range(3):
        llm.engine.step()
    monkeypatch.setattr(Forecast, "_worst_pages", broken_for(BAD, Forecast._worst_pages))
    late = add(llm, "late", 20, FULL)
    finish(llm)
    assert len(bad.output_ids) == 3
    assert told(bad).startswith("choosing who runs next failed")
    assert len(late.output_ids) == 40


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_slot_that_cannot_be_made_ready_ends_its_request(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "uniform:k8v4,window=6"
    llm = llm_of(FULL, formats=["k8v4"])
    kvs = [FULL, FULL]
    kvs.insert(place, other)
    real = SlotRule.write

    def write(self: SlotRule, *args: Any) -> None:
        real(self, *args)
        if self.window == 6:
            raise RuntimeError("half way")

    monkeypatch.setattr(SlotRule, "write", write)
    sequences = [add(llm, str(i), 20 + i, kv) for i, kv in enumerate(kvs)]
    finish(llm)
    bad = sequences.pop(place)
    assert told(bad) == "choosing who runs next failed: RuntimeError('half way')"
    assert all(len(s.output_ids) == 40 for s in sequences)


def test_a_pool_that_cannot_be_asked_ends_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL, max_num_seqs=2)
    running, waiting = [add(llm, "a", 20, FULL), add(llm, "b", 21, FULL)], add(llm, "c", 22, FULL)
    for _ in range(3):
        llm.engine.step()
    bound = first_time(llm.cache.step_page_bound, RuntimeError("nobody's"))
    monkeypatch.setattr(llm.cache, "step_page_bound", bound)
    chunks = llm.engine.step()
    assert {c.request_id for c in chunks if c.finish_reason} == {"a", "b"}
    assert {told(s) for s in running} == {'choosing who runs next failed: RuntimeError("nobody\'s")'}
    finish(llm)
    assert len(waiting.output_ids) == 40


def test_a_pool_that_can_never_be_asked_ends_all_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL, max_num_seqs=2)
    sequences = four(llm)
    with monkeypatch.context() as broken:
        broken.setattr(type(llm.cache), "free_pages", property(lambda _: 1 // 0))
        for _ in range(4):
            llm.engine.step()
    assert all("ZeroDivisionError" in told(s) for s in sequences)
    assert not llm.engine.has_work
    good = add(llm, "good", 20, FULL)
    finish(llm)
    assert good.error is None


@pytest.mark.parametrize("operation", ["swap_in", "swap_out"])
def test_a_swap_that_raises_ends_its_request(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, expected = in_a_tight_pool()
    sequences = four(llm)
    real = getattr(llm.cache, operation)
    monkeypatch.setattr(llm.cache, operation, _raising_once(real))
    finish(llm)
    [bad] = [s for s in sequences if s.error is not None]
    assert told(bad) == "choosing who runs next failed: KeyError('of its own')"
    assert all(s is bad or s.output_ids == e.output_ids for s, e in zip(sequences, expected, strict=True))


def _raising_once(real: Any) -> Any:
    errors = [KeyError("of its own")]

    def called(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*args)

    return called


def test_prompts_beside_one_that_cannot_be_chosen_wait_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    llm: LLM = llm_of(FULL)
    good = [add(llm, name, 20, FULL) for name in "ab"]
    monkeypatch.setattr(Forecast, "_worst_pages", broken_for(BAD, Forecast._worst_pages))
    llm.engine.add(prompt(20), greedy(5), parse_policy(FULL), request_id=BAD)
    last = add(llm, "c", 20, FULL)
    llm.engine.step()
    assert list(llm.engine.scheduler.waiting) == [*good, last]
    assert {s.status for s in good} == {Status.WAITING}
    assert llm.cache.free_slots == llm.cache.spec.max_slots
