"""Latency of a server against its load: percentiles, goodput and where the curve turns up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from siftkv.benchmarks.results import Row
from siftkv.benchmarks.serve_fleet import Closed, Fleet, Open
from siftkv.benchmarks.serve_load import Load, Outcome, Target, Work
from siftkv.benchmarks.serve_prompts import poisson_times
from siftkv.benchmarks.serve_watch import ServerState, Watch, memory_growth
from siftkv.errors import SiftKVError

KNEE = 3.0
WAITING = 0.1
"""The knee is the highest rate up to which latency a token stays within `KNEE` times that at the lowest rate, and the
mean time to the first token within this share of the mean whole answer: beyond, requests wait in a queue that grows.
"""

QUARTER, UNSIFTED, QUARTER_BAR = 0.25, 0.9, 2.5
"""A setting with at most a quarter of bf16's bytes is meant to have its knee at so many times the rate of one that has
nearly all of them.
"""

FLAT = 1.05
"""Most growth of resident memory in a run that is to leave memory flat."""

_WATCHED_SECONDS = 60.0
"""Runs shorter than this say nothing about memory."""

MakeWorks = Callable[[int, random.Random], list[Work]]
"""Makes so many requests with a generator."""


@dataclass(frozen=True)
class Slo:
    """What a good answer keeps to, in seconds: first token, mean further token, whole answer; None = anything."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met(self, outcome: Outcome) -> bool:
        """Whether a whole answer came in time."""
        if outcome.status != "ok":
            return False
        limits = ((self.ttft_s, outcome.ttft_s), (self.tpot_s, outcome.tpot_s), (self.e2e_s, outcome.end_s))
        return all(limit is None or value <= limit for limit, value in limits)


@dataclass(frozen=True)
class LoadLevel:
    """Open loop: `rate` requests a second on average. Closed loop: `clients` that never pause."""

    kind: Literal["rate", "clients"]
    value: float

    @property
    def name(self) -> str:
        return f"{self.value:g} requests/s" if self.kind == "rate" else f"{self.value:g} clients"


@dataclass(frozen=True)
class Point:
    """What one load level gave. Times in seconds; spreads hold mean, p50, p90, p95, p99 and max.

    seconds: from the first request to the last answer. goodput: answers within the SLO a second. per_token: whole time
    of a request by its output tokens (normalised latency). missing_tokens: of answers that ended by length, against
    what was asked. watched: how the server stood meanwhile.
    """

    kind: str
    value: float
    seconds: float
    sent: int
    ok: int
    errors: dict[str, int]
    goodput: float
    requests_per_second: float
    output_tokens_per_second: float
    missing_tokens: int
    ttft: dict[str, float]
    tpot: dict[str, float]
    itl: dict[str, float]
    e2e: dict[str, float]
    per_token: dict[str, float]
    kv_ratio: float | None
    memory_growth: float | None
    watched: list[ServerState]

    @property
    def level(self) -> LoadLevel:
        return LoadLevel(self.kind, self.value)  # type: ignore[arg-type]


async def measure(
    target: Target,
    levels: Sequence[LoadLevel],
    make: MakeWorks,
    requests: int,
    seconds: float | None = None,
    seed: int = 0,
    warmup: int = 4,
    slo: Slo | None = None,
    fleet: Fleet | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Point]:
    """Load a server level by level. Every level has prompts and arrivals of its own, from `seed`.

    requests: at each level; with `seconds`, as many as arrive in that time. Raises SiftKVError when no request of the
    warm-up is answered.
    """
    await warm_up(target, make(warmup, random.Random(f"{seed} warm-up")))
    points = []
    for place, level in enumerate(levels):
        generator = random.Random(f"{seed} {place} {level.name}")
        count = max(1, round(level.value * seconds)) if seconds and level.kind == "rate" else requests
        works = make(count, generator)
        how = _arrivals(level, count, seconds, generator)
        async with Watch(target) as watch:
            outcomes = await (fleet or Fleet()).send(target, works, how)
            await watch.settle()
        points.append(summarise(level, outcomes, slo or Slo(), watch.states))
        progress(f"{level.name}: {points[-1].ok} of {points[-1].sent} answered in {points[-1].seconds:.1f} s")
    return points


def _arrivals(level: LoadLevel, count: int, seconds: float | None, generator: random.Random) -> Open | Closed:
    if level.kind == "rate":
        return Open(poisson_times(level.value, count, generator))
    return Closed(int(level.value), seconds)


async def warm_up(target: Target, works: list[Work]) -> None:
    """Send requests before anything is measured. Raises SiftKVError when none is answered."""
    async with Load(target) as load:
        outcomes = await load.closed_loop(works, max(1, len(works)), None)
    if outcomes and all(outcome.status != "ok" for outcome in outcomes):
        raise SiftKVError(f"{target.url} answers no request: {outcomes[0].error}")


def summarise(level: LoadLevel, outcomes: Sequence[Outcome], slo: Slo, watched: list[ServerState]) -> Point:
    """The figures of one load level."""
    ok = [o for o in outcomes if o.status == "ok"]
    seconds = max((o.started + o.end_s for o in outcomes), default=0.0) - min((o.started for o in outcomes), default=0)
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.status == "error":
            errors[outcome.error or "?"] = errors.get(outcome.error or "?", 0) + 1
    missing = sum(o.asked - o.output_tokens for o in ok if o.finish_reason == "length")
    ratios = [o.kv["ratio"] for o in ok if o.kv and "ratio" in o.kv]
    span = max(seconds, 1e-9)
    return Point(
        kind=level.kind,
        value=level.value,
        seconds=seconds,
        sent=len(outcomes),
        ok=len(ok),
        errors=errors,
        goodput=sum(slo.met(o) for o in ok) / span,
        requests_per_second=len(ok) / span,
        output_tokens_per_second=sum(o.output_tokens for o in ok) / span,
        missing_tokens=missing,
        ttft=spread([o.ttft_s for o in ok]),
        tpot=spread([o.tpot_s for o in ok if o.output_tokens > 1]),
        itl=spread([gap for o in ok for gap in o.gaps_s]),
        e2e=spread([o.end_s for o in ok]),
        per_token=spread([o.end_s / max(1, o.output_tokens) for o in ok]),
        kv_ratio=sum(ratios) / len(ratios) if ratios else None,
        memory_growth=memory_growth(watched) if seconds >= _WATCHED_SECONDS else None,
        watched=watched,
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum; NaN for no values."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), math.nan)
    p50, p90, p95, p99 = np.percentile(values, [50, 90, 95, 99]).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": max(values)}


def knee(points: Sequence[Point]) -> float | None:
    """The highest rate before latency a token or waiting first exceeds `KNEE` or `WAITING`; None for fewer than two
    rates.
    """
    rates = sorted((p for p in points if p.kind == "rate"), key=lambda p: p.value)
    found = None
    for point in rates if len(rates) > 1 else ():
        waits = point.ttft["mean"] > WAITING * point.e2e["mean"]
        if waits or not point.per_token["mean"] <= KNEE * rates[0].per_token["mean"]:
            break
        found = point.value
    return found


def rows(points: Sequence[Point], label: str) -> list[Row]:
    """The figures that a results file lists."""
    found = []
    for p in points:
        where = f"{label}, {p.level.name}"
        errors = p.sent - p.ok
        found += [
            Row(what=f"{where}: requests without a whole answer", value=errors, unit=f"of {p.sent}", bar="<= 0"),
            Row(what=f"{where}: missing tokens", value=p.missing_tokens, unit="tokens", bar="<= 0"),
            Row(what=f"{where}: goodput", value=p.goodput, unit="requests/s"),
            Row(what=f"{where}: output", value=p.output_tokens_per_second, unit="tokens/s"),
            Row(what=f"{where}: latency a token, mean", value=p.per_token["mean"], unit="s"),
            Row(what=f"{where}: time to first token, p50", value=p.ttft["p50"], unit="s"),
            Row(what=f"{where}: time to first token, p99", value=p.ttft["p99"], unit="s"),
            Row(what=f"{where}: inter-token latency, p99", value=p.itl["p99"], unit="s"),
        ]
        if p.memory_growth is not None:
            what = f"{where}: resident memory at the end by that after a quarter"
            found.append(Row(what=what, value=p.memory_growth, bar=f"<= {FLAT}"))
    turn = knee(points)
    return found if turn is None else [*found, Row(what=f"{label}: knee", value=turn, unit="requests/s")]


def against(points: Sequence[Point], label: str, others: Mapping[str, Sequence[Point]]) -> list[Row]:
    """How the knee stands to those of other runs; a quarter of the bytes is held to `QUARTER_BAR`."""
    found, own = [], knee(points)
    for name, other in others.items():
        turn = knee(other)
        if own is None or turn is None:
            continue
        held = _ratio(points) <= QUARTER <= UNSIFTED <= _ratio(other)
        what = f"{label}: knee by that of {name}"
        found.append(Row(what=what, value=own / turn, unit="x", bar=f">= {QUARTER_BAR}" if held else None))
    return found


def _ratio(points: Sequence[Point]) -> float:
    """Mean share of bf16's bytes; NaN where a server does not tell."""
    told = [p.kv_ratio for p in points if p.kv_ratio is not None]
    return sum(told) / len(told) if told else math.nan


def to_data(points: Sequence[Point], label: str, about: dict[str, Any]) -> dict[str, Any]:
    """The `data` of a results file: everything that a plot needs."""
    return about | {"label": label, "points": [asdict(p) for p in points]}


def from_data(data: Any, source: str | Path) -> tuple[str, list[Point]]:
    """Label and points of another run's results file. Raises SiftKVError for a file of another kind."""
    try:
        points = [{**p, "watched": [ServerState(**s) for s in p["watched"]]} for p in data["points"]]
        return str(data["label"]), [Point(**p) for p in points]
    except (KeyError, TypeError) as error:
        raise SiftKVError(f"{source} holds no latencies of a server: give files of siftkv bench serve") from error
