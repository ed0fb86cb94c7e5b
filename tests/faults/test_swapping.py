"""Errors while requests are swapped out and in, and in steps meanwhile."""

from __future__ import annotations

import pytest
import torch

from siftkv.cache import swap
from siftkv.engine import delivery
from siftkv.kernels.reference import pages
from tests.faults.helpers import add, finish, first_time, four, in_a_tight_pool
from tests.hardkv.requests import FULL, llm_of


def test_swapped_requests_outlive_a_step_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, expected = in_a_tight_pool()
    sequences = four(llm)
    while not llm.engine.scheduler.swapped:
        llm.engine.step()
    running = list(llm.engine.scheduler.running)
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine.runner, "decode", first_time(llm.engine.runner.decode, RuntimeError("nobody's")))
        llm.engine.step()
    finish(llm)
    assert [s.error is None for s in sequences] == [s not in running for s in sequences]
    for sequence, other in zip(sequences, expected, strict=True):
        assert sequence.error is not None or sequence.output_ids == other.output_ids


def test_memory_that_is_short_when_a_request_comes_back_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, expected = in_a_tight_pool()
    sequences = four(llm)
    taken = first_time(swap.take_pages, torch.OutOfMemoryError("out of memory"))
    monkeypatch.setattr(swap, "take_pages", taken)
    finish(llm)
    assert [s.output_ids for s in sequences] == [s.output_ids for s in expected]
    assert all(s.error is None for s in sequences)


@pytest.mark.parametrize("host_memory", ["short", "in parts"])
def test_host_memory_that_is_short_ends_nobody(host_memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, expected = in_a_tight_pool()
    if host_memory == "short":
        monkeypatch.setattr(swap, "_to_host", first_time(swap._to_host, RuntimeError("out of memory")))
    else:
        monkeypatch.setattr(swap, "_PART_BYTES", 3 * llm.cache.spec.page_bytes)
    sequences = four(llm)
    finish(llm)
    assert sum(s.preemptions for s in sequences) > 1
    assert [s.output_ids for s in sequences] == [s.output_ids for s in expected]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_pages_come_back_whole_where_giving_them_back_raises(preemption: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, expected = in_a_tight_pool()
    llm.engine.scheduler.preemption = preemption  # type: ignore[assignment]
    raised = first_time(pages.return_pages, RuntimeError("half way"))  # they stand in a table still
    monkeypatch.setattr(pages, "return_pages", raised)
    sequences = four(llm)
    finish(llm)
    assert sum(s.preemptions for s in sequences) > 1
    assert [s.output_ids for s in sequences] == [s.output_ids for s in expected]
    assert all(s.error is None for s in sequences)


def test_an_abort_gives_pages_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    sequences = [add(llm, "a", 20, FULL), add(llm, "b", 20, FULL)]
    for _ in range(3):
        llm.engine.step()
    for name, (owner, operation) in zip("ab", [(pages, "return_pages"), (delivery, "read_counts")], strict=True):
        monkeypatch.setattr(owner, operation, first_time(getattr(owner, operation), RuntimeError("half way")))
        assert [c.finish_reason for c in llm.engine.abort(name)] == ["abort"]
    finish(llm)
    assert all(s.slot == -1 for s in sequences)
