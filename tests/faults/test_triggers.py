"""Errors in triggers, and in selections beside steps: they end their own request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from siftkv.cache import compaction, regroup
from siftkv.engine import cascade, faults
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.errors import StepFailed
from siftkv.policies import parse_policy
from tests.faults.helpers import BAD, add, finish, first_time, is_nothing
from tests.hardkv.layerwise import FakeLane, LayerwiseKernels
from tests.hardkv.requests import FULL, KV, llm_of, with_setting
from tests.test_pipeline import EagerGraphs
from tests.tiny import prompt, tiny_model

MERGE = with_setting("condense=merge,metric=rkv")


def in_a_trigger_of(slot: list[int], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    """`owner.name` raises, its work done, at its second call within triggers of one request."""
    real, trigger, calls = getattr(owner, name), cascade.trigger, [0, 0]

    def watched(cache: Any, own: Any, at: int, seen: int) -> None:
        calls[1] = at == slot[0]
        trigger(cache, own, at, seen)
        calls[1] = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        calls[0] += calls[1] and not is_nothing(found)
        if calls[1] and calls[0] >= 2:
            raise error
        return found

    monkeypatch.setattr(faults, "trigger", watched)
    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize("error", [ValueError("of its own"), torch.OutOfMemoryError("of the GPU")])
@pytest.mark.parametrize(
    ("kv", "owner", "name"),
    [
        (MERGE, cascade, "merge"),
        (KV, compaction, "return_pages"),  # which are in a table still
        (KV, compaction, "write_votes"),
        ("kivi:4,window=8", regroup, "extend_tier"),
    ],
)
@pytest.mark.parametrize("overlapping", [False, True])
def test_a_trigger_that_raises_ends_its_request_alone(
    kv: str, owner: Any, name: str, error: Exception, overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    found = []
    for faulty in (False, True):
        llm = llm_of(kv, formats=["bf16"], model=tiny_model(head_dim=32))
        if overlapping:
            llm.engine.runner.graphs = EagerGraphs(llm)  # type: ignore[assignment]
        good = [add(llm, "a", 40, kv), add(llm, "b", 25, FULL)]
        slot = [-1]
        if faulty:
            in_a_trigger_of(slot, monkeypatch, owner, name, error)
            bad = add(llm, BAD, 50, kv, 70)
            llm.engine.step()
            slot[0] = bad.slot
        finish(llm)
        found.append([(s.output_ids, s.kv and s.kv.per_head_tokens) for s in good])
        assert all(s.error is None for s in good)
    assert bad.finish_reason == "abort"
    assert isinstance(bad.error, StepFailed)
    assert str(bad.error).startswith("request bad: a trigger of its policy failed: ")
    assert found[0] == found[1]


@pytest.mark.parametrize("operation", ["select", "rewrite"])
def test_a_selection_beside_steps_that_raises_ends_its_request_alone(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for faulty in (False, True):
        llm = llm_of(KV, formats=["bf16"])
        llm.cache.kernels = LayerwiseKernels()
        llm.cache.state.scratch["selections"] = FakeLane(late=False)
        good, slot = [add(llm, "a", 40, KV), add(llm, "b", 25, FULL)], [-1]
        if faulty:
            inner = "write_votes" if operation == "select" else "extend_tier"
            in_a_trigger_of(slot, monkeypatch, compaction, inner, RuntimeError("half way"))
            bad = add(llm, BAD, 50, KV)
            llm.engine.step()
            slot[0] = bad.slot
        finish(llm)
        found.append([(s.output_ids, s.kv and s.kv.per_head_tokens) for s in good])
    assert isinstance(bad.error, StepFailed)
    assert found[0] == found[1]
    assert not llm.cache.under_way


def test_joining_a_selection_that_raises_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(KV, formats=["bf16"])
    llm.cache.kernels = LayerwiseKernels()
    lane = llm.cache.state.scratch["selections"] = FakeLane(late=False)
    bad, joins = add(llm, BAD, 50, KV), []
    while not llm.cache.under_way:
        llm.engine.step()

    def join() -> None:
        joins.append(1)
        raise RuntimeError("lost on its stream")

    monkeypatch.setattr(lane.jobs[-1], "join", join)
    llm.cache.under_way[bad.slot] = join
    good = add(llm, "a", 40, KV)
    finish(llm)
    assert joins == [1]
    assert isinstance(bad.error, StepFailed)
    assert good.error is None


def test_joining_a_selection_of_an_aborted_request_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(KV, formats=["bf16"])
    llm.cache.kernels = LayerwiseKernels()
    llm.cache.state.scratch["selections"] = FakeLane(late=False)
    bad, good = add(llm, BAD, 50, KV), add(llm, "a", 40, FULL)
    while not llm.cache.under_way:
        llm.engine.step()
    llm.cache.under_way[bad.slot] = lambda: 1 // 0
    [chunk] = llm.engine.abort(BAD)
    assert chunk.finish_reason == "abort"
    finish(llm)
    assert len(good.output_ids) == 40


def test_a_forced_run_that_raises_leaves_a_whole_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(KV, check_integrity=False)
    row = ForcedRow(prompt(50), prompt(30, 1), parse_policy(KV))
    expected = list(ForcedRun(llm.engine, [row]))
    with monkeypatch.context() as broken:
        broken.setattr(compaction, "return_pages", first_time(compaction.return_pages, KeyError("half way")))
        with pytest.raises(KeyError):
            list(ForcedRun(llm.engine, [row]))
    finish(llm)
    torch.testing.assert_close(list(ForcedRun(llm.engine, [row])), expected)
