"""What HTTP costs, and loads that several processes send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from siftkv.benchmarks import serve_overhead
from siftkv.benchmarks.results import ResultsFile
from siftkv.benchmarks.serve_fleet import Closed, Fleet, Open
from siftkv.benchmarks.serve_load import Target, Work
from siftkv.benchmarks.serve_overhead import Round, Way
from siftkv.cli import app
from siftkv.errors import SiftKVError
from tests.models_helpers import FAMILIES, save_random
from tests.server.dashboard_app import served
from tests.server.fake_openai import FAIL, FakeServer, send


@pytest.fixture
def target() -> Iterator[Target]:
    with served(FakeServer().app) as url:
        yield Target(url, "fake")


class TestFleet:
    def test_two_processes_send_an_open_load(self, target: Target) -> None:
        works = [Work("go", count) for count in (3, 4, 5)]
        outcomes = asyncio.run(Fleet(2).send(target, works, Open([0.0, 0.1, 0.2])))
        assert [(o.status, o.asked, o.output_tokens) for o in outcomes] == [("ok", n, n) for n in (3, 4, 5)]
        assert outcomes[2].started - outcomes[0].started == pytest.approx(0.2, abs=0.1)

    def test_two_processes_send_a_closed_load(self, target: Target) -> None:
        outcomes = asyncio.run(Fleet(2).send(target, [Work("go", 3)] * 5, Closed(3)))
        assert [o.status for o in outcomes] == ["ok"] * 5

    def test_a_process_that_fails_is_told(self, target: Target) -> None:
        with pytest.raises(SiftKVError, match="failed: OSError"):
            asyncio.run(Fleet(1, cores=(4000,)).send(target, [Work("go", 3)], Closed(1)))


def test_whole_answers() -> None:
    async def answer(kind: str) -> dict[str, object]:
        choice = {"text": "ab", "message": {"content": "ab"}, "finish_reason": "length", "index": 0}
        return {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}

    fake = FakeServer()
    fake.app.router.routes.clear()
    fake.app.post("/v1/completions")(lambda: asyncio.run(answer("text")))
    with served(fake.app) as url:
        [outcome] = send(Target(url, "fake", extra={"stream": False}), [Work("go", 2)])
    assert (outcome.status, outcome.text, outcome.output_tokens, len(outcome.piece_s)) == ("ok", "ab", 2, 1)


def test_answers_that_are_not_whole_are_no_figure(target: Target) -> None:
    with pytest.raises(SiftKVError, match="did not answer"):
        serve_overhead._through_http(target.url, [Work(FAIL, 3)], Fleet(), True)


def test_figures_are_medians() -> None:
    rates = [(100, 98, 99), (200, 190, 100), (100, 97, 200)]
    found = serve_overhead.rows([Round(*(Way(rate, 1.0) for rate in part)) for part in rates], "x")
    values = {row.what: (row.value, row.ok) for row in found}
    assert values["x: LLM.generate"] == (100, None)
    assert values["x: server, streamed, by LLM.generate"] == (0.97, True)
    assert values["x: server, whole answers, by LLM.generate"] == (0.99, True)


def test_the_command(tmp_path: Path) -> None:
    save_random(FAMILIES["llama"], tmp_path / "shape")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "shape" / name).unlink()
    path = tmp_path / "overhead.json"
    asked = ["-m", str(tmp_path / "shape"), "--load-format", "dummy", "--requests", "3", "--prompt-length", "5"]
    asked += ["--max-tokens", "4", "--max-num-seqs", "2", "--rounds", "1", "--kv-cache-memory", "8MB"]
    result = CliRunner().invoke(app, ["bench", "serve-overhead", *asked, "--json", str(path)])
    assert result.exit_code == 0, result.output
    stored = ResultsFile.read(path)
    assert [row.unit for row in stored.rows[:3]] == ["tokens/s"] * 3
    [ways] = json.loads(path.read_text())["data"]["rounds"]
    assert all(way["tokens_per_second"] > 0 for way in ways.values())
    assert ways["streamed"]["started_s"] < ways["streamed"]["seconds"]
