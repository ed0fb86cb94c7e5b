"""The picture of latency against load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.ticker import FuncFormatter

from siftkv.benchmarks.plots import SERIES, plain_axes
from siftkv.benchmarks.serve import Point, knee
from siftkv.evaluate.plots import new_figure, save_figure

_MARKS = {"marker": "o", "markersize": 4, "linewidth": 1.6}


def _leading(value: float, place: int) -> str:
    """A tick's number; on a crowded logarithmic axis those that begin with 1, 2 or 5 are enough."""
    return f"{value:g}" if f"{value:.0e}"[0] in "125" else ""


def plot_latency(runs: Mapping[str, Sequence[Point]], path: str | Path, title: str) -> None:
    """Mean latency a token, and median and 99th percentile of the time to first token, against the request rate, or
    against the clients of a closed loop where no run has rates. A colour a run; a dotted line at its knee.

    Raises SiftKVError when the picture cannot be written.
    """
    kind = "rate" if any(p.kind == "rate" for points in runs.values() for p in points) else "clients"
    figure = new_figure(10, 4.4)
    per_token, first = figure.subplots(1, 2)
    for place, (label, points) in enumerate(runs.items()):
        own = sorted((p for p in points if p.kind == kind and p.ok), key=lambda p: p.value)
        colour, x = SERIES[place % len(SERIES)], [p.value for p in own]
        per_token.plot(x, [1e3 * p.per_token["mean"] for p in own], color=colour, label=label, **_MARKS)
        first.plot(x, [p.ttft["p50"] for p in own], color=colour, label=label, **_MARKS)
        first.plot(x, [p.ttft["p99"] for p in own], color=colour, linestyle=(0, (4, 3)), linewidth=1.1, marker=".")
        turn = knee(own)
        if turn is not None and turn < x[-1]:
            per_token.axvline(turn, color=colour, linestyle=":", linewidth=1)
    for axes in (per_token, first):
        axes.set_xlabel("requests a second" if kind == "rate" else "clients at once", fontsize=9)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_leading))
        axes.yaxis.set_minor_formatter(FuncFormatter(_leading))
        plain_axes(axes)
        axes.tick_params(which="minor", labelsize=7)
    per_token.set_ylabel("mean latency a token, ms", fontsize=9)
    first.set_ylabel("time to first token, s (dashed: 99th percentile)", fontsize=9)
    figure.legend(
        *per_token.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    save_figure(figure, path, title)
