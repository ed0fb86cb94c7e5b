"""`siftkv bench serve --disturb`, the command itself, and both against the real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from siftkv.benchmarks import serve, serve_disturb
from siftkv.benchmarks.results import ResultsFile, Row
from siftkv.benchmarks.serve import LoadLevel
from siftkv.benchmarks.serve_load import Outcome, Target, Work
from siftkv.benchmarks.serve_prompts import random_id_prompts, story_prompts
from siftkv.benchmarks.serve_watch import ServerState
from siftkv.cli import app as cli
from siftkv.errors import SiftKVError
from tests.server.dashboard_app import served
from tests.server.fake_openai import FAIL, FakeServer, send
from tests.server.live import Live, byte_llm


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def target(fake: FakeServer) -> Iterator[Target]:
    with served(fake.app) as url:
        yield Target(url, "fake")


class TestDisturb:
    def make(self, count: int, generator: random.Random) -> list[Work]:
        return random_id_prompts(count, 4, 50, 12, generator)

    def run(self, target: Target, **settings: Any) -> serve_disturb.Disturbed:
        return asyncio.run(
            serve_disturb.run_disturbed(
                target, self.make, 40, 8, **({"leave_share": 0.3, "malformed_share": 0.2} | settings)
            )
        )

    @pytest.mark.parametrize("endpoint", ["completions", "chat"])
    def test_shares_and_texts(self, fake: FakeServer, target: Target, endpoint: Any) -> None:
        found = self.run(Target(target.url, "fake", endpoint))
        assert (found.sent, found.left, found.malformed, found.untouched) == (40, 12, 8, 20)
        assert found.refused == 8
        assert found.same == 20
        assert found.differences == []
        assert fake.live == 0
        assert all(row.ok for row in serve_disturb.rows(found, "x") if row.bar)
        assert found.state.pages_free == 10

    def test_every_malformed_body_is_malformed(self, target: Target) -> None:
        for endpoint in ("completions", "chat"):
            asked = Target(target.url, "fake", endpoint)  # type: ignore[arg-type]
            bodies = serve_disturb.malformed_bodies(asked, Work("hello", 3))
            assert {o.status for o in send(asked, [Work("", 3, malformed=b) for b in bodies])} == {"refused"}

    def test_texts_that_change_are_found(self) -> None:
        def answer(*tokens: tuple[str, float]) -> Outcome:
            return Outcome(0, "ok", text="".join(t for t, _ in tokens), tokens=list(tokens))

        works = [Work("a", 3), Work("b", 3), Work("c", 3), Work("d", 3, leave_after=1), Work("e", 3, malformed=b"")]
        before = [answer((" a", 1.0), (" b", gap)) for gap in (1.0, 5e-5, 1.0, 1.0, 1.0)]
        after = [answer((" a", 1.0), (" c", 0)), answer((" a", 1.0), (" bc", 0)), before[2], Outcome(0), Outcome(0)]
        found = serve_disturb.compare(works, before, after, ServerState(0, None, 1, 9, 10, False))
        assert [(d.request, d.token, d.gap) for d in found.differences] == [(0, 1, 1.0), (1, 1, 5e-5)]
        assert found.same == 1
        missed = {row.what.removeprefix("x: "): row.value for row in serve_disturb.rows(found, "x") if row.ok is False}
        assert missed == {
            "malformed requests that were not refused": 1,
            "untouched texts that differ where the choice was not within 0.0001 nats": 1,
            "pages that did not come back": 1,
            "completions that the server still has": 1,
            "integrity faults": 1,
        }

    def test_impossible_shares(self, target: Target) -> None:
        with pytest.raises(SiftKVError, match="less than 1"):
            self.run(target, leave_share=0.9, malformed_share=0.1)

    def test_it_needs_a_server_that_works(self, target: Target) -> None:
        with pytest.raises(SiftKVError, match="although nothing disturbed it"):
            asyncio.run(serve_disturb.run_disturbed(target, lambda n, _: [Work(FAIL, 3)] * n, 4, 2, 0.2, 0.2))


class TestCommand:
    def invoke(self, *arguments: str) -> Any:
        return CliRunner().invoke(cli, ["bench", "serve", *arguments])

    def test_rates_files_and_pictures(self, fake: FakeServer, target: Target, tmp_path: Path) -> None:
        asked = [
            "--url",
            target.url,
            "--rate",
            "50,200",
            "--requests",
            "8",
            "--max-tokens",
            "4",
            "--prompt-length",
            "9",
        ]
        first, second, picture = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "p.png"
        done = self.invoke(*asked, "--label", "one", "--json", str(first), "--slo-ttft", "1")
        assert done.exit_code == 0, done.output
        assert "50 requests/s" in done.output
        rest = ["--kv", "full", "--compare", str(first), "--json", str(second), "--plot", str(picture), "--ignore-eos"]
        done = self.invoke(*asked, *rest)
        assert done.exit_code == 0, done.output
        assert fake.bodies[-1]["ignore_eos"] is True
        assert fake.bodies[-1]["kv"] == "full"
        results = ResultsFile.read(second)
        assert results.name == "serve"
        assert results.ok
        assert results.data["label"] == "full"
        assert [p["value"] for p in results.data["points"]] == [50, 200]
        assert picture.stat().st_size > 10_000
        assert ResultsFile.read(first).data["points"][0]["goodput"] < results.data["points"][0]["goodput"]

    def test_disturbed(self, target: Target, tmp_path: Path) -> None:
        found = tmp_path / "a.json"
        asked = ["--disturb", "--requests", "20", "--concurrency", "4", "--max-tokens", "5", "--json", str(found)]
        done = self.invoke("--url", target.url, *asked)
        assert done.exit_code == 0, done.output
        results = ResultsFile.read(found)
        assert results.data["disturbed"]["malformed"] == 2
        wanted = Row(what="fake: malformed requests that were not refused", value=0, unit="of 2", bar="<= 0")
        assert wanted in results.rows

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ([], "how much load"),
            (["--rate", "fast"], "--rate fast"),
            (["--rate", "0"], "--rate 0"),
            (["--concurrency", "1.5"], "whole numbers"),
            (["--concurrency", "inf"], "whole numbers"),
            (["--rate", "1", "--endpoint", "embeddings"], "embeddings"),
            (["--rate", "1", "--prompts", "nowhere.txt"], "nowhere.txt"),
            (["--rate", "1", "--json", "/nowhere/a.json"], "/nowhere/a.json"),
        ],
    )
    def test_wrong_options_are_named(self, target: Target, wrong: list[str], told: str) -> None:
        done = self.invoke("--url", target.url, *wrong)
        assert done.exit_code == 2
        assert told in done.stderr

    def test_other_results_are_refused(self, target: Target, tmp_path: Path) -> None:
        other = tmp_path / "other.json"
        ResultsFile(name="demo", command="", rows=[], data={}).write(other)
        done = self.invoke("--url", target.url, "--rate", "1", "--compare", str(other))
        assert done.exit_code == 2
        assert "bench serve" in done.stderr


class TestRealServer:
    @pytest.fixture(scope="class")
    def live(self) -> Iterator[Live]:
        live = Live(byte_llm(check_integrity=False)).ready()
        yield live
        live.close()

    def make(self, count: int, generator: random.Random) -> list[Work]:
        return story_prompts(count, 12, 16, generator)

    def test_latency(self, live: Live) -> None:
        target = Target(live.url, "tiny", extra={"temperature": 0, "ignore_eos": True, "kv": "full"})
        levels = [LoadLevel("rate", 20.0), LoadLevel("clients", 3)]
        points = asyncio.run(serve.measure(target, levels, self.make, 6, warmup=1))
        assert [(p.sent, p.ok, p.missing_tokens, p.errors) for p in points] == [(6, 6, 0, {})] * 2
        assert points[0].watched[-1].live == 0
        assert points[0].watched[-1].integrity_ok
        assert points[0].watched[-1].resident_bytes
        assert points[0].kv_ratio
        live.check_settled()

    @pytest.mark.parametrize("endpoint", ["completions", "chat"])
    def test_disturbed(self, live: Live, endpoint: Any) -> None:
        target = Target(live.url, "tiny", endpoint, extra={"ignore_eos": True})
        found = asyncio.run(serve_disturb.run_disturbed(target, self.make, 20, 8, 0.3, 0.3))
        assert (found.refused, found.untouched) == (6, 8)
        assert 0 < found.left <= 6  # bytes that are no text come late: some answers end in fewer pieces
        assert [row.what for row in serve_disturb.rows(found, "x") if row.ok is False] == []
        live.check_settled()

    def test_every_malformed_body_is_refused(self, live: Live) -> None:
        for endpoint in ("completions", "chat"):
            asked = Target(live.url, "tiny", endpoint)  # type: ignore[arg-type]
            bodies = serve_disturb.malformed_bodies(asked, Work("hello", 3))
            found = send(asked, [Work("", 3, malformed=body) for body in bodies])
            assert [body for body, o in zip(bodies, found, strict=True) if o.status != "refused"] == []
