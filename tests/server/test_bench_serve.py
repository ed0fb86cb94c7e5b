"""`siftkv bench serve` against a small server whose answers, delays and faults are known."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from siftkv.benchmarks import serve
from siftkv.benchmarks.serve import LoadLevel, Slo
from siftkv.benchmarks.serve_load import Outcome, Target, Work, served_model
from siftkv.benchmarks.serve_prompts import file_prompts, poisson_times, random_id_prompts, story_prompts
from siftkv.benchmarks.serve_watch import ServerState, memory_growth
from siftkv.errors import SiftKVError
from tests.server.dashboard_app import served
from tests.server.fake_openai import CUT, FAIL, QUIET, FakeServer, send


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
def target(fake: FakeServer) -> Iterator[Target]:
    with served(fake.app) as url:
        yield Target(url, "fake")


class TestLoad:
    def test_a_whole_answer(self, target: Target) -> None:
        [outcome] = send(target, [Work("slow start", 5)])
        assert (outcome.status, outcome.text, outcome.finish_reason) == ("ok", " w" * 5, "length")
        assert (outcome.prompt_tokens, outcome.output_tokens, outcome.kv) == (3, 5, {"ratio": 0.25})
        assert len(outcome.piece_s) == 5
        assert 0.04 <= outcome.ttft_s < outcome.end_s
        assert outcome.tpot_s == pytest.approx(sum(outcome.gaps_s) / 4)
        assert outcome.gaps_s[0] < outcome.ttft_s

    def test_what_is_sent(self, fake: FakeServer, target: Target) -> None:
        chat = Target(target.url, "fake", "chat", extra={"kv": "diffkv"})
        assert [o.text for o in send(target, [Work([1, 2], 2)]) + send(chat, [Work("hello", 2)])] == [" w w"] * 2
        plain, talk = fake.bodies
        assert plain["prompt"] == [1, 2]
        assert plain["stream_options"] == {"include_usage": True}
        assert "kv" not in plain
        assert talk["messages"] == [{"role": "user", "content": "hello"}]
        assert talk["kv"] == "diffkv"

    @pytest.mark.parametrize(("kind", "told"), [(FAIL, "500.*no luck"), (CUT, "without .DONE.")])
    def test_errors_are_told(self, target: Target, kind: str, told: str) -> None:
        [outcome] = send(target, [Work(f"{kind} it", 4)])
        assert outcome.status == "error"
        assert outcome.error is not None
        assert re.search(told, outcome.error)

    def test_tokens_without_text_are_an_answer(self, target: Target) -> None:
        [outcome] = send(target, [Work(f"{QUIET} one", 3)])
        assert (outcome.status, outcome.output_tokens) == ("ok", 3)

    def test_nobody_answers(self) -> None:
        [outcome] = send(Target("http://127.0.0.1:9"), [Work("hello", 3)])
        assert outcome.status == "error"
        with pytest.raises(SiftKVError, match=r"127\.0\.0\.1:9"):
            asyncio.run(served_model(Target("http://127.0.0.1:9")))

    def test_a_client_that_leaves_frees_the_server(self, fake: FakeServer, target: Target) -> None:
        works = [Work("go", 400, leave_after=n) for n in (0, 1, 3)] + [Work("stay", 3)]
        outcomes = send(target, works)
        assert [o.status for o in outcomes] == ["left", "left", "left", "ok"]
        assert [len(o.piece_s) for o in outcomes[1:3]] == [1, 3]
        end = time.monotonic() + 5
        while fake.live and time.monotonic() < end:
            time.sleep(0.01)
        assert (fake.finished, fake.live) == (1, 0)
        assert fake.left in (2, 3)  # the first may be gone before the server has begun

    def test_clients_at_once(self, fake: FakeServer, target: Target) -> None:
        outcomes = send(target, [Work("hello", 10)] * 12, clients=3)
        assert fake.most == 3
        assert len(outcomes) == 12
        assert all(o.status == "ok" for o in outcomes)

    def test_until_a_time(self, target: Target) -> None:
        outcomes = send(target, [Work("a", 5), Work("b", 6)], clients=2, seconds=0.3)
        assert len(outcomes) > 4
        assert max(o.started for o in outcomes) < 0.3
        assert [o.output_tokens for o in outcomes] == [5 + i % 2 for i in range(len(outcomes))]

    def test_the_model_is_asked_for(self, target: Target) -> None:
        assert asyncio.run(served_model(Target(target.url))) == "fake"
        assert asyncio.run(served_model(Target(target.url, "mine"))) == "mine"


class TestPrompts:
    def test_poisson_arrivals(self) -> None:
        times = poisson_times(5.0, 4000, random.Random(0))
        gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(0.2, rel=0.05)
        assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(0.04, rel=0.1)
        assert times == poisson_times(5.0, 4000, random.Random(0)) != poisson_times(5.0, 4000, random.Random(1))
        assert poisson_times(math.inf, 3, random.Random(0)) == [0, 0, 0]

    def test_files(self, tmp_path: Path) -> None:
        lines, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
        lines.write_text('{"prompt": "one", "max_tokens": 3}\n\n{"prompt": [4, 5]}\n')
        plain.write_text("one two\nthree\n")
        assert file_prompts(lines, 9) == [Work("one", 3), Work([4, 5], 9)]
        assert file_prompts(plain, 9) == [Work("one two", 9), Work("three", 9)]
        lines.write_text('{"prompt": "one"}\n{"text": "two"}\n')
        with pytest.raises(SiftKVError, match="line 2"):
            file_prompts(lines, 9)
        plain.write_text("\n")
        with pytest.raises(SiftKVError, match="no prompts"):
            file_prompts(plain, 9)

    def test_made_prompts(self) -> None:
        stories = story_prompts(3, 20, 7, random.Random(0))
        assert [len(str(w.prompt).split()) for w in stories] == [20] * 3
        assert len({str(w.prompt) for w in stories}) == 3
        ids = random_id_prompts(4, 50, 10, 7, random.Random(0))
        drawn = {t for w in ids for t in w.prompt}
        assert all(len(w.prompt) == 50 for w in ids)
        assert drawn == set(range(1, 10))


def outcome(
    ttft: float = 0.1, gap: float = 0.01, tokens: int = 3, status: str = "ok", at: float = 0.0, asked: int = 0
) -> Outcome:
    pieces = [ttft + gap * i for i in range(tokens)]
    return Outcome(
        at,
        status,
        200,
        None if status == "ok" else "bad",
        "",
        pieces,
        pieces[-1],
        3,
        tokens,
        "length",  # type: ignore[arg-type]
        asked=asked,
    )


class TestFigures:
    def test_a_level(self) -> None:
        outcomes = [outcome(0.1 * i, at=i, asked=3 + (i > 2)) for i in (1, 2, 3, 4)]
        outcomes.append(outcome(status="error", at=2.0, asked=9))
        level = LoadLevel("rate", 1.0)
        point = serve.summarise(level, outcomes, Slo(ttft_s=0.25), [])
        assert (point.sent, point.ok, point.errors) == (5, 4, {"bad": 1})
        assert point.seconds == pytest.approx(4 + 0.42 - 1)
        assert point.goodput == pytest.approx(2 / point.seconds)
        assert point.requests_per_second == pytest.approx(4 / point.seconds)
        assert point.output_tokens_per_second == pytest.approx(12 / point.seconds)
        assert point.missing_tokens == 2
        assert point.ttft["p50"] == pytest.approx(0.25)
        assert point.itl["max"] == pytest.approx(0.01)
        assert point.per_token["mean"] == pytest.approx((0.25 + 0.02) / 3)

    @pytest.mark.parametrize(
        ("slo", "met"),
        [(Slo(), True), (Slo(0.1, 0.01, 0.12), True), (Slo(ttft_s=0.09), False), (Slo(tpot_s=0.009), False),
         (Slo(e2e_s=0.11), False)],
    )  # fmt: skip
    def test_limits(self, slo: Slo, met: bool) -> None:
        on_the_limit = outcome()
        on_the_limit.end_s, on_the_limit.piece_s = 0.12, [0.1, 0.11, 0.12]
        slack = Slo(*(x and x + 1e-9 for x in (slo.ttft_s, slo.tpot_s, slo.e2e_s)))
        assert slack.met(on_the_limit) == met
        assert not slo.met(outcome(status="error"))

    def test_the_knee(self) -> None:
        def at(rate: float, latency: float, wait: float = 0.01) -> serve.Point:
            made = [outcome(wait, 3 * latency / 2 - wait / 2, 3)]
            return serve.summarise(LoadLevel("rate", rate), made, Slo(), [])

        points = [at(4, 0.29), at(1, 0.1), at(8, 0.31), at(16, 0.1)]
        assert serve.knee(points) == 4
        assert serve.knee(points[:2]) == 4
        assert serve.knee([]) is None
        assert serve.knee(points[:1]) is None
        assert serve.knee([at(1, 0.1), at(2, 0.1, wait=0.028), at(3, 0.1, wait=0.032), at(4, 0.1)]) == 2
        bars = {row.what: row for row in serve.rows(points, "x")}
        assert bars["x: knee"].value == 4
        assert bars["x, 1 requests/s: requests without a whole answer"].ok

    @pytest.mark.parametrize(("own", "other", "bar"), [(0.25, 1.0, ">= 2.5"), (0.3, 1.0, None), (0.2, 0.5, None)])
    def test_knees_of_two_runs(self, own: float, other: float, bar: str | None) -> None:
        def at(rate: float, ratio: float | None) -> serve.Point:
            made = outcome(0.001, 0.1, 3)
            made.kv = None if ratio is None else {"ratio": ratio}
            return serve.summarise(LoadLevel("rate", rate), [made], Slo(), [])

        [row] = serve.against([at(1, own), at(6, own)], "x", {"y": [at(1, other), at(2, other)]})
        assert (row.what, row.value, row.bar) == ("x: knee by that of y", 3, bar)
        [row] = serve.against([at(1, None), at(6, None)], "x", {"y": [at(1, other), at(2, other)]})
        assert row.bar is None
        assert serve.against([], "x", {"y": [at(2, 1.0)]}) == []

    def test_memory(self) -> None:
        def at(seconds: float, size: int | None) -> ServerState:
            return ServerState(seconds, size)

        states = [at(0, 100), at(5, 190), at(10, 200), at(20, 210)]
        assert memory_growth(states) == pytest.approx(210 / 190)
        assert memory_growth([at(s, None) for s in range(9)]) is None


class TestMeasure:
    def test_levels(self, fake: FakeServer, target: Target) -> None:
        def make(count: int, generator: random.Random) -> list[Work]:
            return random_id_prompts(count, 4, 50, 6, generator)

        levels = [LoadLevel("rate", 100.0), LoadLevel("clients", 2)]
        first, second = asyncio.run(serve.measure(target, levels, make, 10, warmup=1))
        assert (first.sent, first.ok, second.ok) == (10, 10, 10)
        assert first.kv_ratio == 0.25
        assert len(fake.bodies) == 21
        assert len({tuple(b["prompt"]) for b in fake.bodies}) == 21
        assert first.watched[-1].pages_free == 10
        prompts = [b["prompt"] for b in fake.bodies]
        fake.bodies.clear()
        asyncio.run(serve.measure(target, levels, make, 10, warmup=1))
        assert sorted(b["prompt"] for b in fake.bodies) == sorted(prompts)

    def test_a_server_that_always_fails(self, target: Target) -> None:
        with pytest.raises(SiftKVError, match="no luck"):
            asyncio.run(serve.measure(target, [], lambda count, _: [Work(FAIL, 3)] * count, 10))
