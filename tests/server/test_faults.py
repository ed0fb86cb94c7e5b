"""Errors that nobody foresaw, seen by clients and by whoever watches the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from siftkv.engine import faults
from tests.server.live import Live, byte_llm, wait_for

BODY = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}


def lost(*_: object) -> Any:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def check_failed(server: Live) -> None:
    wait_for(lambda: server.get("/health").status_code == 500)
    assert server.get("/health").json() == {"status": "failed"}
    assert server.get("/ready").status_code == 503
    answer = server.post("/v1/completions", BODY)
    assert answer.status_code == 500
    assert "the GPU does not answer any more" in answer.json()["error"]["message"]
    server.close()


def test_a_lost_device_is_told_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = byte_llm()
    server = Live(llm).ready()
    monkeypatch.setattr(llm.engine.runner, "decode", lost)
    monkeypatch.setattr(faults, "answers", lambda device: False)
    answer = server.post("/v1/completions", BODY)
    assert answer.status_code == 500
    assert "the GPU does not answer any more" in answer.json()["error"]["message"]
    check_failed(server)


def test_a_device_that_is_lost_before_a_request_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Live(byte_llm("sift")).ready()
    monkeypatch.setattr("siftkv.engine.engine.layer_costs", lost)
    monkeypatch.setattr(faults, "answers", lambda device: False)
    answer = server.post("/v1/completions", BODY | {"kv": "sift:ratio=0.3"})
    assert answer.status_code == 500
    assert "measuring layers failed and the GPU does not answer any more" in answer.json()["error"]["message"]
    check_failed(server)


class PanicException(BaseException):
    """As Rust's libraries raise it."""

    __module__ = "pyo3_runtime"


def test_a_tokenizer_that_panics_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object, **__: object) -> str:
        raise PanicException("index out of bounds")

    llm = byte_llm()
    server = Live(llm).ready()
    with monkeypatch.context() as broken:
        broken.setattr(llm.engine, "tokenizer", SimpleNamespace(decode=decode))
        answer = server.post("/v1/completions", BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the tokenizer panicked: index out of bounds"
    assert server.post("/v1/completions", BODY).status_code == 200
    server.check_settled()
    server.close()
