"""Rates that follow one another without a pause: each is measured on a server that is as full as the rate makes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from siftkv.benchmarks.serve import LoadLevel, MakeWorks, Point, Slo, summarise, warm_up
from siftkv.benchmarks.serve_fleet import Fleet, Open
from siftkv.benchmarks.serve_load import Outcome, Target, Work
from siftkv.benchmarks.serve_prompts import poisson_times
from siftkv.benchmarks.serve_watch import Watch


async def climb(
    target: Target,
    rates: Sequence[float],
    make: MakeWorks,
    seconds: float,
    ramp: float,
    seed: int = 0,
    warmup: int = 4,
    slo: Slo | None = None,
    fleet: Fleet | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Point]:
    """Load a server with Poisson arrivals, `seconds` at each rate, in the order of `rates`: give them ascending.

    A point is of the requests that arrive after the first `ramp` seconds of its rate. Its throughput is what the server
    did in that time for whatever request. What the server said of itself stands in the last point.
    """
    await warm_up(target, make(warmup, random.Random(f"{seed} warm-up")))
    works: list[Work] = []
    times: list[float] = []
    for place, rate in enumerate(rates):
        generator = random.Random(f"{seed} {place} {rate:g}")
        drawn = poisson_times(rate, round(2 * rate * seconds) + 20, generator)
        arrivals = [place * seconds + moment for moment in drawn if moment < seconds]
        works += make(len(arrivals), generator)
        times += arrivals
    async with Watch(target) as watch:
        outcomes = await (fleet or Fleet()).send(target, works, Open(times))
        await watch.settle()
    points = []
    for place, rate in enumerate(rates):
        begin, end = place * seconds + ramp, (place + 1) * seconds
        own = [outcome for outcome in outcomes if begin <= outcome.started < end]
        last = place == len(rates) - 1
        point = summarise(LoadLevel("rate", rate), own, slo or Slo(), watch.states if last else [])
        points.append(_within(point, outcomes, own, slo or Slo(), begin, end))
        progress(
            f"{point.level.name}: {point.ok} of {point.sent} answered, {points[-1].requests_per_second:.2f} a second"
        )
    return points


def _within(
    point: Point, outcomes: Sequence[Outcome], own: Sequence[Outcome], slo: Slo, begin: float, end: float
) -> Point:
    """The same point with the throughput between two moments. A request's tokens come evenly from its first on."""
    ok = [outcome for outcome in outcomes if outcome.status == "ok"]
    tokens = 0.0
    for outcome in ok:
        first, last = outcome.started + outcome.ttft_s, outcome.started + outcome.end_s
        share = (min(last, end) - max(first, begin)) / max(last - first, 1e-9)
        tokens += outcome.output_tokens * max(0.0, share)
    done = sum(begin <= outcome.started + outcome.end_s < end for outcome in ok)
    span = end - begin
    return replace(
        point,
        seconds=span,
        goodput=sum(slo.met(outcome) for outcome in own) / span,
        requests_per_second=done / span,
        output_tokens_per_second=tokens / span,
    )
