"""Errors in what is made of one request's tokens: its draw, its text, its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from siftkv.engine import delivery
from siftkv.engine.delivery import Delivery
from siftkv.engine.grammar import GrammarState
from siftkv.engine.sampler import Sampler
from siftkv.errors import LibraryFailed, StepFailed
from siftkv.policies import parse_policy
from tests.faults.helpers import BAD, add, finish, first_time
from tests.hardkv.requests import FULL, greedy, llm_of
from tests.test_pipeline import EagerGraphs
from tests.tiny import prompt


def broken_at(real: Any, count: int) -> Any:
    """`Delivery.append` that raises for the bad request's token number `count`."""

    def called(sequence: Any, token: int, logprob: Any) -> Any:
        if len(sequence.output_ids) == count - 1 and sequence.request_id == BAD:
            raise KeyError("of its own")
        return real(sequence, token, logprob)

    return called


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


@pytest.mark.parametrize("operation", ["report_of", "read_counts"])
def test_what_came_before_an_error_is_handed_out(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    sequence, chunks = add(llm, "a", 20, FULL, 5), []
    monkeypatch.setattr(delivery, operation, first_time(getattr(delivery, operation), KeyError("of its own")))
    while llm.engine.has_work:
        chunks += llm.engine.step()
    assert isinstance(sequence.error, StepFailed)
    assert [token for chunk in chunks for token in chunk.token_ids] == sequence.output_ids
    assert "".join(chunk.text for chunk in chunks) == sequence.stops.text
    assert len(sequence.output_ids) == 5


def test_an_error_while_a_failed_request_is_ended_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(FULL)
    bad, good = add(llm, BAD, 20, FULL), add(llm, "a", 20, FULL)
    monkeypatch.setattr(llm.engine.delivery, "append", broken_at(llm.engine.delivery.append, 8))
    learn = first_time(llm.engine.scheduler.forecast.learn_output, MemoryError("as well"))
    monkeypatch.setattr(llm.engine.scheduler.forecast, "learn_output", learn)
    finish(llm)
    assert str(bad.error) == "request bad: making text of its tokens failed: KeyError('of its own')"
    assert good.error is None


class PanicException(BaseException):
    """As Rust's libraries raise it."""

    __module__ = "pyo3_runtime"


class Forbids:
    """A guide that raises at its own request's fifth token."""

    failure = None

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def start(self) -> Forbids:
        return self

    def allowed(self, output_ids: Sequence[int], vocab: int) -> Tensor:
        if len(output_ids) == 5:
            raise self.error
        return torch.ones(vocab, dtype=torch.bool)


@pytest.mark.parametrize("error", [AssertionError("of theirs"), PanicException("of theirs")])
@pytest.mark.parametrize("library", ["tokenizer", "grammar"])
def test_assertions_and_panics_of_libraries_end_their_request(
    library: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(FULL)
    expected = [add(llm, x, 20 + i, FULL) for i, x in enumerate("ab")]
    finish(llm)
    params = replace(greedy(40), guide=Forbids(error)) if library == "grammar" else greedy(40)
    sequences = [add(llm, x, 20 + i, FULL) for i, x in enumerate("cd")]
    llm.engine.add(prompt(30), params, parse_policy(FULL), request_id=BAD)
    [bad] = llm.engine.sequences(BAD)
    if library == "tokenizer":

        def decode(*_: object, **__: object) -> str:
            raise error

        monkeypatch.setattr(bad.detokenizer, "_tokenizer", SimpleNamespace(decode=decode))
    finish(llm)
    assert isinstance(bad.error, StepFailed)
    said = "an assertion of the {} failed" if isinstance(error, AssertionError) else "the {} panicked"
    assert str(bad.error).endswith(f"failed: {said.format(library)}: of theirs")
    assert [s.output_ids for s in sequences] == [s.output_ids for s in expected]


@pytest.mark.parametrize("error", [AssertionError("of theirs"), PanicException("of theirs")])
def test_a_tokenizer_that_fails_on_a_prompt_refuses_the_request(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object, **__: object) -> str:
        raise error

    llm = llm_of(FULL)
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine, "tokenizer", SimpleNamespace(decode=decode))
        with pytest.raises(LibraryFailed, match="of theirs"):
            add(llm, "a", 20, FULL)
    add(llm, "a", 20, FULL)
    finish(llm)


def test_a_tokenizer_that_fails_while_layers_are_measured_refuses_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(_: str) -> None:
        raise PanicException("of theirs")

    llm = llm_of("sift", kv_cache_memory_bytes=8 << 20)
    llm.model.decoder.layer_costs = None
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine, "tokenizer", encode)
        with pytest.raises(LibraryFailed, match="the tokenizer panicked: of theirs"):
            add(llm, "a", 20, "sift:ratio=0.3")
    assert not llm.engine.has_work


@pytest.mark.parametrize("error", [ValueError("half way"), PanicException("half way")])
def test_a_grammar_that_raised_is_not_asked_to_go_on(error: BaseException) -> None:
    calls = []

    def consume(tokens: list[int]) -> bool:
        calls.append(tokens)
        raise error

    matcher = SimpleNamespace(consume_tokens=consume, is_error=lambda: False, compute_bitmask=lambda: b"\xff")
    state = GrammarState(matcher)
    for _ in range(2):
        with pytest.raises((ValueError, LibraryFailed), match="half way"):
            state.allowed([3], 8)
    assert calls == [[3]]
