"""A picture of a results file's rows: a panel of bars for each unit, what was promised as a mark.

`python -m siftkv.benchmarks.row_plots FILE...` draws files anew, each beside itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siftkv.benchmarks.plots import SERIES
from siftkv.benchmarks.results import ResultsFile, Row
from siftkv.evaluate.plots import new_figure, save_figure

_MET, _MISSED = SERIES[0], SERIES[1]
_LINE, _FRAME = 0.21, 0.55
"""Inches of a row, and of a panel's edge with its unit."""

_FAR = 100
"""A panel is logarithmic where a value is so many times what is wanted of others."""


def plot_rows(rows: Sequence[Row], path: str | Path, title: str) -> None:
    """Values of the rows whose value is a number, unit by unit in order of appearance; a dark mark stands where its
    bar does, and a value that misses it has another colour. A unit whose values lie far beyond its marks is drawn on
    a logarithmic axis, any other from zero.

    Raises SiftKVError when the picture cannot be written.
    """
    panels: dict[str, list[tuple[Row, float]]] = {}
    for row in rows:
        if isinstance(row.value, (int, float)) and not isinstance(row.value, bool):
            panels.setdefault(row.unit, []).append((row, float(row.value)))
    heights = [_FRAME + _LINE * len(own) for own in panels.values()] or [1.0]
    figure = new_figure(11, 0.5 + sum(heights))
    grid = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (unit, own) in zip(grid, panels.items(), strict=False):
        _panel(axes, own, unit)
    save_figure(figure, path, title)


def _panel(axes: Any, own: Sequence[tuple[Row, float]], unit: str) -> None:
    bars = [(place, row.limit) for place, (row, _) in enumerate(own) if row.limit is not None]
    colours = [_MISSED if row.ok is False else _MET for row, _ in own]
    axes.barh(range(len(own)), [value for _, value in own], 0.72, color=colours, zorder=2)
    for place, limit in bars:
        axes.plot([limit, limit], [place - 0.45, place + 0.45], color="#222222", linewidth=1.6, zorder=3)
    reach = max([0.0, *(value for _, value in own), *(limit for _, limit in bars)])
    for place, (_, value) in enumerate(own):
        shown = f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        axes.annotate(shown, (1.02 * reach, place), fontsize=7, va="center", annotation_clip=False)
    axes.set_yticks(range(len(own)), [row.what for row, _ in own], fontsize=7)
    axes.set_xlim(0, reach or 1.0)
    least = min((value for _, value in own), default=0.0)
    if bars and least > 0 and reach > _FAR * max(limit for _, limit in bars):
        axes.set_xscale("log")
        axes.set_xlim(least / 2, reach)
    axes.invert_yaxis()
    axes.set_xlabel(unit or "count", fontsize=8, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.tick_params(axis="x", labelsize=7)
    axes.tick_params(axis="y", length=0)


def redraw(path: Path) -> Path:
    """Draw a results file's rows beside it and return where. Raises SiftKVError where it is no results file."""
    results, picture = ResultsFile.read(path), path.with_suffix(".png")
    plot_rows(results.rows, picture, title_of(results))
    return picture


def title_of(results: ResultsFile) -> str:
    """Its name, day and machine, and what marks and colours mean where there are any."""
    machine = ", ".join(results.hardware.gpu or [results.hardware.cpu])
    told = "; dark mark: what is wanted, orange: missed" if any(row.bar for row in results.rows) else ""
    return f"{results.name}, {results.date[:10]}, {machine}, torch {results.versions.get('torch')}{told}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(redraw(Path(name)))
