"""Errors that nobody foresaw, on a GPU: in selections beside decode steps, in replays, and of the device itself."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from siftkv import LLM
from siftkv.engine.graphs import DecodeGraphs
from siftkv.engine.sequence import Sequence
from siftkv.errors import SiftKVError, StepFailed
from siftkv.kernels import cuda
from tests.gpu.test_gpu_hardkv import GREEDY, HARDKV, open_llm, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def out_of_memory() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def refused_launch() -> None:
    raise SiftKVError("the CUDA driver failed to launch select: invalid argument")


def start(llm: LLM, which: tuple[int, ...]) -> list[Sequence]:
    for i in which:
        llm.engine.add(prompts()[i], GREEDY, llm.kv, request_id=f"r{i}")
    return [llm.engine.sequences(f"r{i}")[0] for i in which]


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
    llm.cache.check_integrity()
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert not llm.cache.under_way


@pytest.mark.parametrize("fault", [out_of_memory, refused_launch])
@pytest.mark.parametrize("operation", ["select", "rewrite"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_selection_that_raises_ends_its_request_alone(
    eager: bool, operation: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = HARDKV.replace("interval=16", "interval=4")
    llm = open_llm(kv, enforce_eager=eager, check_integrity=True)
    expected = start(llm, (0, 2, 3, 4))  # four requests and three are one size of captured batch
    finish(llm)
    for sequence in expected:
        llm.engine.forget(sequence.request_id)
    found = start(llm, (0, 2, 3, 4))
    bad, real, calls = found[2], getattr(cuda, operation), [0]

    def called(state: Any, slot: int, *args: Any, **kwargs: Any) -> Any:
        result = real(state, slot, *args, **kwargs)
        own = int(state.seen[slot]) >= 500  # a selection sees a copy of its request, in a slot of its own
        calls[0] += own
        if own and calls[0] == 3:
            fault()
        return result

    monkeypatch.setattr(llm.cache, "kernels", SimpleNamespace(**(vars(cuda) | {operation: called})))
    finish(llm)
    assert isinstance(bad.error, StepFailed)
    assert 0 < len(bad.output_ids) < 80
    same = len(bad.output_ids)  # sums are shared out in another way in smaller batches
    for sequence, other in zip(found, expected, strict=True):
        assert sequence is bad or (sequence.error is None and len(sequence.output_ids) == 80)
        assert sequence.output_ids[:same] == other.output_ids[:same]


@pytest.mark.parametrize("fault", [out_of_memory, refused_launch])
def test_a_replay_that_raises_ends_what_runs(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = open_llm(HARDKV, check_integrity=True)
    expected = start(llm, (0, 2))
    finish(llm)
    for sequence in expected:
        llm.engine.forget(sequence.request_id)
    found = start(llm, (0, 2))
    for _ in range(9):
        llm.engine.step()
    real, turns = DecodeGraphs.launch, [0]

    def launch(*args: Any) -> Any:
        landing = real(*args)
        turns[0] += 1
        if turns[0] == 5:
            fault()
        return landing

    monkeypatch.setattr(DecodeGraphs, "launch", launch)
    finish(llm)
    for sequence, other in zip(found, expected, strict=True):
        assert isinstance(sequence.error, StepFailed)
        assert sequence.output_ids == other.output_ids[: len(sequence.output_ids)]
        llm.engine.forget(sequence.request_id)
    again = start(llm, (0, 2))
    finish(llm)
    assert [s.output_ids for s in again] == [s.output_ids for s in expected]


def test_a_step_that_could_not_be_captured_is_captured_later(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = start(llm := open_llm(HARDKV), (0, 2))
    finish(llm)
    llm = open_llm(HARDKV, check_integrity=True)
    real, calls = DecodeGraphs._step, [0]

    def step(self: DecodeGraphs, size: int) -> Any:
        calls[0] += 1
        result = real(self, size)
        if calls[0] == 1:
            out_of_memory()
        return result

    monkeypatch.setattr(DecodeGraphs, "_step", step)
    found = start(llm, (0, 2))
    finish(llm)
    assert all("memory ran out" in str(s.error) for s in found)
    for sequence in found:
        llm.engine.forget(sequence.request_id)
    again = start(llm, (0, 2))
    finish(llm)
    assert [s.output_ids for s in again] == [s.output_ids for s in expected]


LOST = """
import torch
from tests.gpu.test_gpu_hardkv import GREEDY, open_llm, prompts

llm = open_llm("full", formats=[], enforce_eager=True)
def decode(*args):
    torch.zeros(4, device="cuda")[torch.full((4,), 1 << 40, device="cuda")].sum().item()
llm.engine.runner.decode = decode
llm.generate(prompts(), GREEDY)
"""


def test_a_lost_device_ends_the_engine_with_a_clear_message() -> None:
    found = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=120)
    assert found.returncode != 0
    before, told, after = found.stderr.rpartition("siftkv.errors.DeviceLost: ")
    assert told, before[-2000:]
    assert after.startswith("a decode step failed and the GPU does not answer any more (")
    assert "Traceback" not in after
