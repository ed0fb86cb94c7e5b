"""Quality against physical bytes: which settings no other beats on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siftkv.evaluate.bootstrap import Interval
from siftkv.evaluate.plots import log_scale, new_figure, save_figure

_FRONT = "#2a78d6"
_POINT = "#222222"
_GRID = {"axis": "y", "color": "#dddddd", "linewidth": 0.6}


@dataclass(frozen=True)
class Point:
    """A setting. share: physical bytes as a share of bf16. quality: with its interval."""

    name: str
    share: float
    quality: Interval


def frontier(points: Sequence[Point], lower_is_better: bool) -> list[Point]:
    """Points that no other beats in bytes and quality both, by rising share of bytes."""
    sign = 1.0 if lower_is_better else -1.0
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.share, sign * p.quality.value)):
        if not best or sign * point.quality.value < sign * best[-1].quality.value:
            best.append(point)
    return best


def plot_pareto(
    points: Sequence[Point], path: str | Path, title: str, quality: str, lower_is_better: bool, log: bool = False
) -> None:
    """Points with their intervals and the line of those that no other beats. quality: label of the y axis.

    Raises SiftKVError when the picture cannot be written.
    """
    figure = new_figure(7.5, 4.8)
    axes = figure.subplots()
    shown = [p for p in points if not log or p.quality.value > 0]
    front = frontier(shown, lower_is_better)
    axes.plot([100 * p.share for p in front], [p.quality.value for p in front], "-", color=_FRONT, lw=1.4, zorder=2)
    for i, point in enumerate(shown):
        _draw(axes, point, point in front, above=i % 2 == 0)
    if log and shown:
        log_scale(axes)
    axes.margins(x=0.12, y=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("physical KV bytes, % of bf16")
    axes.set_ylabel(quality)
    axes.grid(**_GRID)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, title)


def _draw(axes: Any, point: Point, on_front: bool, above: bool) -> None:
    q, x = point.quality, 100 * point.share
    error = [[max(0.0, q.value - q.low)], [max(0.0, q.high - q.value)]]
    colour = _FRONT if on_front else _POINT
    axes.errorbar(x, q.value, yerr=error, fmt="o", color=colour, ms=5, lw=0.9, capsize=2, zorder=3)
    offset = (6, 5 if above else -11)
    axes.annotate(point.name, (x, q.value), xytext=offset, textcoords="offset points", fontsize=7.5, color=colour)
