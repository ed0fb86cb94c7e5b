"""Errors in decode steps: they end all that run, and nobody else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from siftkv.attention.decode import choosers
from siftkv.errors import SiftKVError, StepFailed
from siftkv.kernels.reference import sift
from tests.faults.helpers import add, finish, first_time
from tests.hardkv.requests import FULL, llm_of
from tests.test_pipeline import EagerGraphs


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("place", ["decode_attention", "sift_step", "take_pages"])
def test_a_step_that_raises_ends_all_that_run_and_nobody_else(
    place: str, overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    kv = "diffkv:window=8,sinks=2"
    llm = llm_of(kv, max_num_seqs=2)
    expected = add(llm, "alone", 33, kv)
    finish(llm)
    if overlapping:
        llm.engine.runner.graphs = EagerGraphs(llm)  # type: ignore[assignment]
    running, waiting = [add(llm, "a", 40, kv, 150), add(llm, "b", 25, kv, 150)], add(llm, "c", 33, kv)
    for _ in range(6):
        llm.engine.step()
    taken = [len(s.output_ids) for s in running]
    chunks, owner = [], sift if place == "take_pages" else llm.cache.kernels
    with monkeypatch.context() as broken:
        broken.setattr(owner, place, first_time(getattr(owner, place), RuntimeError("nobody's")))
        while not chunks or chunks[-1].finish_reason is None:
            chunks += llm.engine.step()
    assert [s.finish_reason for s in running] == ["abort"] * 2
    assert all(str(s.error).endswith('a decode step failed: RuntimeError("nobody\'s")') for s in running)
    assert {c.request_id for c in chunks if c.finish_reason} == {"a", "b"}
    assert all(len(s.output_ids) >= n + overlapping for s, n in zip(running, taken, strict=True)), "what has arrived"
    assert waiting.finish_reason is None
    late = add(llm, "d", 33, kv)
    finish(llm)
    assert [waiting.output_ids, late.output_ids] == [expected.output_ids] * 2


def test_page_choosers_of_a_failed_step_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    add(llm, "a", 20, FULL)
    for _ in range(2):
        llm.engine.step()
    choosers(llm.cache)[0] = lambda *_: None  # type: ignore[assignment]
    monkeypatch.setattr(llm.engine.runner, "decode", first_time(lambda *_: None, RuntimeError("early")))
    llm.engine.step()
    assert not choosers(llm.cache)


def test_a_landing_that_raises_ends_all_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    llm = llm_of(FULL)
    llm.engine.runner.graphs = EagerGraphs(llm)  # type: ignore[assignment]
    sequences = [add(llm, "a", 40, FULL), add(llm, "b", 25, FULL)]
    for _ in range(4):
        llm.engine.step()
    assert llm.engine.flights.under_way is not None
    llm.engine.flights.under_way.landing.wait = first_time(lambda: None, RuntimeError("lost"))  # type: ignore[method-assign]
    llm.engine.step()
    assert all(isinstance(s.error, StepFailed) for s in sequences)
    finish(llm)


def test_memory_that_ran_out_is_told_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    sequence = add(llm, "a", 20, FULL)
    monkeypatch.setattr(
        llm.engine.runner, "decode", first_time(llm.engine.runner.decode, torch.OutOfMemoryError("CUDA"))
    )
    finish(llm)
    assert isinstance(sequence.error, SiftKVError)
    assert "lower gpu_memory_utilization" in str(sequence.error)
