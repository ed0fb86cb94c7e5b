"""Rates that follow one another without a pause."""

from __future__ import annotations

import asyncio
import random

import pytest
from typer.testing import CliRunner

from siftkv.benchmarks.serve_load import Target, Work
from siftkv.benchmarks.serve_prompts import random_id_prompts
from siftkv.benchmarks.serve_stairs import climb
from siftkv.cli import app
from tests.server.dashboard_app import served
from tests.server.fake_openai import FakeServer


def test_each_rate_is_measured_after_its_ramp() -> None:
    def make(count: int, generator: random.Random) -> list[Work]:
        return random_id_prompts(count, 4, 50, 5, generator)

    fake = FakeServer()
    with served(fake.app) as url:
        low, high = asyncio.run(climb(Target(url, "fake"), [20.0, 100.0], make, 1.0, 0.5, warmup=1))
    assert (low.value, high.value) == (20.0, 100.0)
    assert len(fake.bodies) - 1 > low.sent + high.sent  # those of the ramps are load alone
    assert 2 <= low.sent < high.sent
    assert (low.ok, high.ok) == (low.sent, high.sent)
    assert high.requests_per_second == pytest.approx(high.sent / 0.5, rel=0.5)
    assert high.output_tokens_per_second == pytest.approx(5 * high.requests_per_second, rel=0.5)
    assert (low.watched, high.seconds) == ([], 0.5)
    assert high.watched


@pytest.mark.parametrize(
    "asked",
    [["--rate", "1,2"], ["--rate", "2,1", "--duration", "9"], ["--concurrency", "2", "--duration", "9"],
     ["--rate", "1", "--duration", "3"]],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_climbed(asked: list[str]) -> None:
    with served(FakeServer().app) as url:
        result = CliRunner().invoke(app, ["bench", "serve", "--url", url, "--ramp", "4", *asked])
    assert "--ramp needs ascending --rate" in str(result.exception) + result.output
