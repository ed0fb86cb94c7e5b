"""What ends the engine: a lost device, and books that are wrong."""

from __future__ import annotations

import pytest
import torch

from siftkv.engine import faults
from siftkv.errors import DeviceLost, IntegrityError
from siftkv.policies import parse_policy
from tests.faults.helpers import add, finish, first_time
from tests.hardkv.requests import FULL, greedy, llm_of
from tests.tiny import prompt


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


def test_what_has_ended_the_engine_is_raised_again_and_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    llm = llm_of(FULL)
    running, waiting = add(llm, "a", 20, FULL), add(llm, "b", 20, FULL)
    monkeypatch.setattr(llm.engine.runner, "prefill", first_time(llm.engine.runner.prefill, error))
    with monkeypatch.context() as lost:
        lost.setattr(faults, "answers", lambda device: False)
        with pytest.raises(DeviceLost) as first:
            llm.engine.step()
    for name in ("state", "kernels"):
        monkeypatch.delattr(llm.cache, name)
    monkeypatch.setattr(type(llm.cache), "free_pages", property(lambda _: 1 // 0))
    for again in (llm.engine.step, llm.engine.step, lambda: llm.generate([prompt(20)], greedy(5))):
        with pytest.raises(DeviceLost, match="does not answer any more") as caught:
            again()
        assert str(caught.value) == str(first.value)
    assert [c.finish_reason for name in "ab" for c in llm.engine.abort(name)] == ["abort"] * 2
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")
    assert not llm.engine.has_work


def test_a_device_that_is_lost_while_layers_are_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    llm = llm_of("sift", kv_cache_memory_bytes=8 << 20)
    monkeypatch.setattr("siftkv.engine.engine.layer_costs", lost)
    other = parse_policy("sift:ratio=0.3")
    with pytest.raises(torch.AcceleratorError):
        llm.engine.add(prompt(20), greedy(5), other)
    assert not llm.engine.failed
    monkeypatch.setattr(faults, "answers", lambda device: False)
    with pytest.raises(DeviceLost, match="measuring layers failed"):
        llm.engine.add(prompt(20), greedy(5), other)
    assert llm.engine.failed


def test_an_assertion_of_our_own_beside_a_library_is_raised() -> None:
    llm = llm_of(FULL)
    sequence = add(llm, "a", 20, FULL)
    sequence.stops.stop_reason = "already"
    with pytest.raises(AssertionError, match="text after a stop string"):
        finish(llm)
    assert llm.engine.failed
