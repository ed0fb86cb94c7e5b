"""The gate's figures over all positions of all windows, with intervals, by position and by text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siftkv.benchmarks.results import Row
from siftkv.evaluate.bootstrap import RESAMPLES, Floats, Interval, drawn_positions, interval
from siftkv.evaluate.gate import WindowResult
from siftkv.evaluate.report import markdown_table, with_bounds

METRICS = ("mean_kl", "p90_kl", "worst_decile_kl", "top1_agreement", "perplexity_ratio")

_ROUNDING = 1e-6
"""Mean KL, nats a token, up to which two caches differ by the order of sums alone."""


@dataclass(frozen=True)
class Bucket:
    """Positions `[start, stop)` after the prompt, over all windows. mean_kl: nats. top1_agreement: 0 to 1."""

    start: int
    stop: int
    mean_kl: Interval
    top1_agreement: float


@dataclass(frozen=True)
class Size:
    """Physical bytes, means over windows. physical: at the end. peak: at most. ratio, peak_ratio: of the bytes of bf16.

    per_live_entry: bytes that one key and value of one head takes, everything included.
    """

    physical: float
    peak: float
    ratio: float
    peak_ratio: float
    per_live_entry: float


@dataclass(frozen=True)
class GateSummary:
    """One setting. metrics: by the names of METRICS; KL in nats a token, agreement 0 to 1. texts: mean KL a text.

    drift: mean KL of the last bucket by that of the first; None where the first has none but rounding.
    """

    kv: str
    positions: int
    metrics: dict[str, Interval]
    buckets: list[Bucket]
    texts: dict[str, float]
    size: Size

    @property
    def drift(self) -> float | None:
        first, last = self.buckets[0].mean_kl.value, self.buckets[-1].mean_kl.value
        return last / first if first > _ROUNDING else None


@dataclass(frozen=True)
class Gap:
    """Mean KL of `kv` minus that of `other`, over the same draws of windows and positions. Below 0: `kv` is closer."""

    kv: str
    other: str
    mean_kl: Interval


def summarise(
    results: Sequence[WindowResult], buckets: int = 8, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[list[GateSummary], list[Gap]]:
    """A summary for each setting, in order, and the gap between every two. All windows have equally many positions."""
    by_kv: dict[str, list[WindowResult]] = {}
    for result in results:
        by_kv.setdefault(result.kv, []).append(result)
    first = next(iter(by_kv.values()))
    shape = len(first), len(first[0].kl)
    stacks = {kv: _stack(own) for kv, own in by_kv.items()}
    drawn: dict[str, list[Floats]] = {kv: [] for kv in by_kv}
    for index in drawn_positions(*shape, seed=seed, resamples=resamples):
        for kv, stack in stacks.items():
            drawn[kv].append(_metrics(stack[:, index]))
    resampled = {kv: np.stack(rows, 1) for kv, rows in drawn.items()}  # [metrics, resamples]
    summaries = [
        GateSummary(
            kv=kv,
            positions=shape[0] * shape[1],
            metrics=_intervals(_metrics(stacks[kv]), resampled[kv]),
            buckets=_buckets(stacks[kv].reshape(4, *shape), buckets, seed),
            texts={
                t: fmean(float(r.kl.mean()) for r in own if r.text == t) for t in dict.fromkeys(r.text for r in own)
            },
            size=_size(own),
        )
        for kv, own in by_kv.items()
    ]
    return summaries, _gaps({kv: _metrics(s)[0] for kv, s in stacks.items()}, {k: r[0] for k, r in resampled.items()})


def _stack(own: Sequence[WindowResult]) -> Floats:
    """fp64 `[4, windows * positions]`: kl, agree, nll, reference_nll, windows laid end to end."""
    return np.stack([np.concatenate([getattr(r, n) for r in own]) for n in ("kl", "agree", "nll", "reference_nll")])


def _metrics(stack: Floats) -> Floats:
    """The figures of METRICS, `[5]`, of positions `[4, n]`. Worst decile: the mean over the tenth of largest KL."""
    kl, agree, nll, reference = stack
    tenth = -(-len(kl) // 10)
    worst = np.partition(kl, len(kl) - tenth)[len(kl) - tenth :]
    return np.asarray(
        [kl.mean(), np.quantile(kl, 0.9), worst.mean(), agree.mean(), np.exp(nll.mean() - reference.mean())]
    )


def _intervals(values: Floats, resampled: Floats) -> dict[str, Interval]:
    return {name: interval(values[i], resampled[i]) for i, name in enumerate(METRICS)}


def _buckets(stack: Floats, count: int, seed: int) -> list[Bucket]:
    """stack: `[4, windows, positions]`."""
    windows, positions = stack.shape[1:]
    edges: NDArray[np.int64] = np.linspace(0, positions, min(count, positions) + 1).round().astype(np.int64)
    found = []
    for start, stop in pairwise(edges):
        kl = stack[0, :, start:stop]
        flat = kl.reshape(-1)
        draws = np.asarray([flat[i].mean() for i in drawn_positions(windows, kl.shape[1], seed, 200)])
        agreement = float(stack[1, :, start:stop].mean())
        found.append(Bucket(int(start), int(stop), interval(flat.mean(), draws), agreement))
    return found


def _size(own: Sequence[WindowResult]) -> Size:
    def mean(name: str) -> float:
        return fmean(r.cache[name] for r in own)

    peak_ratio = fmean(r.cache["peak_bytes"] / r.cache["bf16_bytes"] for r in own)
    return Size(mean("physical_bytes"), mean("peak_bytes"), mean("ratio"), peak_ratio, mean("bytes_per_live_token"))


def _gaps(values: Mapping[str, float], resampled: Mapping[str, Floats]) -> list[Gap]:
    names = list(values)
    return [
        Gap(kv, other, interval(values[kv] - values[other], resampled[kv] - resampled[other]))
        for i, kv in enumerate(names)
        for other in names[i + 1 :]
    ]


def gate_rows(summaries: Sequence[GateSummary]) -> list[Row]:
    """Figures for a results file."""
    found = []
    for s in summaries:
        units = ("nats/token", "nats/token", "nats/token", "share", "x")
        found += [
            Row(what=f"{s.kv}: {name}", value=s.metrics[name].value, unit=unit) for name, unit in zip(METRICS, units)
        ]
        found += [
            Row(what=f"{s.kv}: physical bytes", value=s.size.ratio, unit="of bf16"),
            Row(what=f"{s.kv}: peak bytes", value=s.size.peak_ratio, unit="of bf16"),
            Row(what=f"{s.kv}: drift", value=s.drift, unit="x"),
        ]
    return found


def gate_sections(summaries: Sequence[GateSummary], gaps: Sequence[Gap]) -> dict[str, str]:
    """The Markdown of a report."""
    return {
        "Fidelity against physical bytes": _table(summaries),
        "Mean KL by position after the prompt": _bucket_table(summaries),
        "Mean KL by text": _text_table(summaries),
        "Settings whose mean KL differs": _gap_table(gaps),
    }


def _table(summaries: Sequence[GateSummary]) -> str:
    header = ["setting", "mean KL, nats/token", "p90", "worst 10%", "top-1", "ppl ratio", "physical", "peak", "B/entry"]
    rows = []
    for s in summaries:
        m, top1 = s.metrics, s.metrics["top1_agreement"].scaled(100)
        kl = [with_bounds(m["mean_kl"], 3), f"{m['p90_kl'].value:.4f}", f"{m['worst_decile_kl'].value:.4f}"]
        size = [f"{s.size.ratio:.1%}", f"{s.size.peak_ratio:.1%}", f"{s.size.per_live_entry:.1f}"]
        rows.append([s.kv, *kl, f"{with_bounds(top1)} %", with_bounds(m["perplexity_ratio"], 5), *size])
    note = "Brackets: 95 % bootstrap intervals over windows and blocks of positions. Bytes: of bf16, all included."
    return f"{markdown_table(header, rows)}\n\n{note}"


def _bucket_table(summaries: Sequence[GateSummary]) -> str:
    spans = [f"{b.start}-{b.stop - 1}" for b in summaries[0].buckets]
    rows = [
        [s.kv, *(f"{b.mean_kl.value:.5f}" for b in s.buckets), "-" if s.drift is None else f"{s.drift:.2f}"]
        for s in summaries
    ]
    return markdown_table(["setting", *spans, "last / first"], rows)


def _text_table(summaries: Sequence[GateSummary]) -> str:
    texts = list(summaries[0].texts)
    return markdown_table(["setting", *texts], [[s.kv, *(f"{s.texts[t]:.5f}" for t in texts)] for s in summaries])


def _gap_table(gaps: Sequence[Gap]) -> str:
    rows = [[g.kv, g.other, with_bounds(g.mean_kl, 3, sign=True)] for g in gaps if g.mean_kl.excludes_zero]
    if not rows:
        return "No two settings differ outside their interval."
    return markdown_table(["setting", "against", "difference, nats/token"], rows, left=2)


def gate_data(summaries: Sequence[GateSummary], gaps: Sequence[Gap], about: Mapping[str, Any]) -> dict[str, Any]:
    """What the results file keeps beside its rows. about: how it was measured."""
    own = [asdict(s) | {"drift": s.drift} for s in summaries]
    return {**about, "summaries": own, "gaps": [asdict(g) for g in gaps]}
