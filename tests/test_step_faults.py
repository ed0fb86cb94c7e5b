"""Errors that nobody foresaw, in triggers, decode steps and what follows them: who ends, and who does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from siftkv import LLM
from siftkv.attention.decode import choosers
from siftkv.cache import compaction, regroup, swap
from siftkv.engine import cascade, faults
from siftkv.engine.delivery import Delivery
from siftkv.engine.sampler import Sampler
from siftkv.engine.sequence import Sequence
from siftkv.errors import DeviceLost, IntegrityError, SiftKVError, StepFailed
from siftkv.kernels.reference import sift
from siftkv.policies import parse_policy
from tests.hardkv.layerwise import FakeLane, LayerwiseKernels
from tests.hardkv.requests import FULL, KV, greedy, llm_of, tight, with_setting
from tests.test_pipeline import EagerGraphs
from tests.tiny import prompt, tiny_llm, tiny_model

MERGE = with_setting("condense=merge,metric=rkv")
BAD = "bad"


def is_nothing(found: object) -> bool:
    return isinstance(found, Tensor) and not found.numel()


def first_time(real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """`real`, whose first call raises, its work done."""
    errors = [error]

    def called(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if errors and not is_nothing(found):
            raise errors.pop()
        return found

    return called


def add(llm: LLM, name: str, length: int, kv: str, tokens: int = 40) -> Sequence:
    llm.engine.add(prompt(length, length), greedy(tokens), parse_policy(kv), request_id=name)
    return llm.engine.sequences(name)[0]


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
    llm.cache.check_integrity()
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert llm.cache.free_slots == llm.cache.spec.max_slots


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


def broken_at(real: Any, count: int) -> Any:
    """`Delivery.append` that raises for the bad request's token number `count`."""

    def called(sequence: Any, token: int, logprob: Any) -> Any:
        if len(sequence.output_ids) == count - 1 and sequence.request_id == BAD:
            raise KeyError("of its own")
        return real(sequence, token, logprob)

    return called


def four(llm: LLM) -> list[Sequence]:
    return [add(llm, str(n), 30 + n, "full:window=8", 120) for n in range(4)]


def in_a_tight_pool() -> tuple[LLM, list[Sequence]]:
    """An engine that has to swap to run `four`, and what they are where there is room."""
    roomy = tiny_llm("full:window=8", max_window=8)
    expected = four(roomy)
    finish(roomy)
    return tiny_llm("full:window=8", max_window=8, kv_cache_memory_bytes=tight(roomy, 40)), expected


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


def test_a_report_is_of_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    llm = llm_of(FULL)
    llm.engine.runner.graphs = EagerGraphs(llm)  # type: ignore[assignment]
    bad = add(llm, BAD, 40, FULL, 8)
    monkeypatch.setattr(llm.engine.delivery, "append", broken_at(llm.engine.delivery.append, 8))
    finish(llm)
    assert isinstance(bad.error, StepFailed)
    llm.engine.runner.graphs = None
    others = []
    for name in range(llm.cache.spec.max_slots):  # one after another, until each slot has been used again
        others.append(add(llm, str(name), 20, FULL, 5))
        finish(llm)
    assert {other.kv.tokens_seen for other in others if other.kv is not None} == {24}


def test_an_abort_whose_text_raises_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    sequence = add(llm, "a", 20, FULL)
    for _ in range(3):
        llm.engine.step()
    monkeypatch.setattr(sequence.detokenizer, "flush", first_time(lambda: "", KeyError("of its text")))
    llm.engine.abort("a")
    assert sequence.finish_reason == "abort"
    finish(llm)


def test_page_choosers_of_a_failed_step_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    add(llm, "a", 20, FULL)
    for _ in range(2):
        llm.engine.step()
    choosers(llm.cache)[0] = lambda *_: None  # type: ignore[assignment]
    monkeypatch.setattr(llm.engine.runner, "decode", first_time(lambda *_: None, RuntimeError("early")))
    llm.engine.step()
    assert not choosers(llm.cache)


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


@pytest.mark.parametrize(("owner", "name"), [(Sampler, "sample"), (Delivery, "append")])
def test_what_one_token_does_is_its_requests_own(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    expected = [add(llm, x, 20 + i, FULL) for i, x in enumerate("ab")]
    finish(llm)
    sequences = [add(llm, x, 20 + i, FULL) for i, x in enumerate("cde")]
    bad, real = sequences[2], getattr(owner, name)

    def called(self: Any, first: Any, *rest: Any) -> Any:
        touched = first is bad if owner is Delivery else any(row is bad.row for row in rest[0])
        if touched and len(bad.output_ids) == 5:
            raise KeyError("of its own")
        return real(self, first, *rest)

    monkeypatch.setattr(owner, name, called)
    finish(llm)
    assert isinstance(bad.error, StepFailed)
    assert len(bad.output_ids) == 5
    assert [s.output_ids for s in sequences[:2]] == [s.output_ids for s in expected]


@pytest.mark.parametrize("error", [AssertionError("a broken invariant"), IntegrityError("a page is owned twice")])
def test_what_says_that_the_books_are_wrong_is_raised(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    add(llm, "a", 20, FULL)
    monkeypatch.setattr(llm.engine.runner, "decode", first_time(llm.engine.runner.decode, error))
    with pytest.raises(type(error)):
        finish(llm)


@pytest.mark.parametrize("place", ["prefill", "decode"])
def test_a_lost_device_is_told(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    llm = llm_of(FULL)
    add(llm, "a", 20, FULL)
    monkeypatch.setattr(llm.engine.runner, place, first_time(getattr(llm.engine.runner, place), error))
    monkeypatch.setattr(faults, "answers", lambda device: False)
    monkeypatch.setattr(llm.cache, "release", first_time(llm.cache.release, error))
    with pytest.raises(DeviceLost, match=r"GPU does not answer any more \(AcceleratorError\('CUDA error: an illegal"):
        llm.generate([prompt(20)])


def test_memory_that_ran_out_is_told_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    sequence = add(llm, "a", 20, FULL)
    monkeypatch.setattr(
        llm.engine.runner, "decode", first_time(llm.engine.runner.decode, torch.OutOfMemoryError("CUDA"))
    )
    finish(llm)
    assert isinstance(sequence.error, SiftKVError)
    assert "lower gpu_memory_utilization" in str(sequence.error)
