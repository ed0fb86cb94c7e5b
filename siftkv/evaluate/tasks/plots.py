"""Accuracy against physical bytes, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from siftkv.evaluate.pareto import Point, plot_pareto
from siftkv.evaluate.tasks.results import ALL, TaskScore


def draw(scores: Sequence[TaskScore], folder: str | Path, title: str) -> dict[str, str]:
    """A picture a task, and one of all together, into a folder; what each shows, by file name.

    Raises SiftKVError when they cannot be written.
    """
    pictures = {}
    for task in dict.fromkeys(s.task for s in scores):
        points = [Point(s.kv, s.ratio, s.accuracy.scaled(100)) for s in scores if s.task == task]
        name = "pareto.png" if task == ALL else f"pareto-{task}.png"
        plot_pareto(points, Path(folder) / name, f"{title}\n{task}", "accuracy, %", lower_is_better=False)
        pictures[name] = f"Accuracy against physical bytes: {task}"
    return pictures
