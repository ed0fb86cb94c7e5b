"""Heatmaps of retrieval: depth against length for tasks that have a depth, task against length for the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from siftkv.evaluate.plots import new_figure, save_figure
from siftkv.evaluate.retrieval.results import ALL, Score, seen


def draw(scores: Sequence[Score], folder: str | Path, title: str) -> dict[str, str]:
    """Draw heatmaps into a folder, one file a way of asking and kind of task; what each shows, by file name.

    Raises SiftKVError when they cannot be written.
    """
    pictures = {}
    for visible in dict.fromkeys(s.visible for s in scores):
        own = [s for s in scores if s.visible == visible and s.task != ALL]
        word, asked = "visible" if visible else "hidden", seen(visible)
        deep = [s for s in own if s.cells[0].depth is not None]
        flat = [s for s in own if s.cells[0].depth is None]
        if deep:
            pictures[f"depth-{word}.png"] = f"Score by depth and length, {asked}"
            _by_depth(deep, Path(folder) / f"depth-{word}.png", f"{title}, {asked}")
        if flat:
            pictures[f"length-{word}.png"] = f"Score by task and length, {asked}"
            _by_task(flat, Path(folder) / f"length-{word}.png", f"{title}, {asked}")
    return pictures


def _by_depth(scores: Sequence[Score], path: Path, title: str) -> None:
    settings, tasks = (list(dict.fromkeys(getattr(s, n) for s in scores)) for n in ("kv", "task"))
    lengths = sorted({c.length for s in scores for c in s.cells})
    depths = sorted({c.depth for s in scores for c in s.cells if c.depth is not None})
    figure = new_figure(1.8 + len(tasks) * (1.2 + 0.55 * len(lengths)), 0.9 + len(settings) * (0.7 + 0.3 * len(depths)))
    panels = figure.subplots(len(settings), len(tasks), squeeze=False)
    for s in scores:
        axis = panels[settings.index(s.kv)][tasks.index(s.task)]
        grid = np.full((len(depths), len(lengths)), np.nan)
        for c in s.cells:
            if c.depth is not None:
                grid[depths.index(c.depth), lengths.index(c.length)] = c.score
        image = _heatmap(axis, grid, [f"{d:.0%}" for d in depths], [str(n) for n in lengths])
        _name(axis, f"{s.kv} ({s.ratio:.0%} of bf16)", len(lengths), s.task)
    for axis in panels[:, 0]:
        axis.set_ylabel("depth of the answer", fontsize=8)
    _finish(figure, panels, image, path, title)


def _by_task(scores: Sequence[Score], path: Path, title: str) -> None:
    settings, tasks = (list(dict.fromkeys(getattr(s, n) for s in scores)) for n in ("kv", "task"))
    lengths = sorted({c.length for s in scores for c in s.cells})
    figure = new_figure(3.2 + len(settings) * (0.8 + 0.55 * len(lengths)), 1.6 + 0.45 * len(tasks))
    panels = figure.subplots(1, len(settings), squeeze=False)
    for axis, kv in zip(panels[0], settings, strict=True):
        grid = np.full((len(tasks), len(lengths)), np.nan)
        own = [s for s in scores if s.kv == kv]
        for s in own:
            for c in s.cells:
                grid[tasks.index(s.task), lengths.index(c.length)] = c.score
        image = _heatmap(axis, grid, tasks if axis is panels[0][0] else [""] * len(tasks), [str(n) for n in lengths])
        _name(axis, f"{kv} ({own[0].ratio:.0%} of bf16)", len(lengths))
    _finish(figure, panels, image, path, title)


def _name(axis: Any, setting: str, lengths: int, *below: str) -> None:
    """A panel's title, in lines that end before the next panel: a `kv` string has no spaces to break at."""
    lines = wrap(setting.replace(",", ", "), 18 + 7 * lengths)
    axis.set_title("\n".join([*(line.replace(", ", ",") for line in lines), *below]), loc="left", fontsize=8)


def _heatmap(axis: Any, grid: Any, rows: Sequence[str], columns: Sequence[str]) -> Any:
    image = axis.imshow(100 * grid, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    axis.set_yticks(range(len(rows)), rows, fontsize=8)
    axis.set_xticks(range(len(columns)), columns, fontsize=8)
    axis.tick_params(length=0)
    for (row, column), value in np.ndenumerate(grid):
        if not np.isnan(value):
            axis.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7.5)
    return image


def _finish(figure: Any, panels: Any, image: Any, path: Path, title: str) -> None:
    for axis in panels[-1]:
        axis.set_xlabel("tokens of context", fontsize=8)
    figure.colorbar(image, ax=list(panels.flat), label="score, %", fraction=0.04, pad=0.02)
    save_figure(figure, path, title)
