"""Retrieval scores by task, length and depth, and their paired differences to the full cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from siftkv.benchmarks.results import Row
from siftkv.evaluate.bootstrap import Interval, mean_interval
from siftkv.evaluate.report import markdown_table, with_bounds
from siftkv.evaluate.retrieval.run import Outcome

ALL = "all tasks"
FULL = "full"


@dataclass(frozen=True)
class Cell:
    """Mean score, 0 to 1, of a task at a length and depth (None: the task has none)."""

    task: str
    length: int
    depth: float | None
    score: float


@dataclass(frozen=True)
class Score:
    """One setting on one task, the question seen or not. score: mean over items, 0 to 1. items: how many.

    loss: score of full minus that of the setting, paired by item; None without full. ratio, peak_ratio: physical bytes
    at the end and at most, of bf16.
    """

    kv: str
    visible: bool
    task: str
    items: int
    score: float
    loss: Interval | None
    ratio: float
    peak_ratio: float
    cells: list[Cell]


def summarise(outcomes: Sequence[Outcome]) -> list[Score]:
    """By setting and visibility: all tasks together (each weighing the same), then each task."""
    found = []
    for kv, visible in dict.fromkeys((o.kv, o.visible) for o in outcomes):
        own = [o for o in outcomes if (o.kv, o.visible) == (kv, visible)]
        full = {o.item.name: o.score for o in outcomes if (o.kv, o.visible) == (FULL, visible)}
        tasks = [_score(t, [o for o in own if o.item.task == t], full) for t in dict.fromkeys(o.item.task for o in own)]
        found += [_together(own, tasks, full), *tasks]
    return found


def _score(task: str, own: Sequence[Outcome], full: Mapping[str, float]) -> Score:
    first = own[0]
    losses = [full[o.item.name] - o.score for o in own if o.item.name in full]
    places = dict.fromkeys((o.item.task, o.item.length, o.item.depth) for o in own)
    cells = [
        Cell(*place, fmean(o.score for o in own if (o.item.task, o.item.length, o.item.depth) == place))
        for place in places
    ]
    return Score(
        kv=first.kv,
        visible=first.visible,
        task=task,
        items=len(own),
        score=fmean(o.score for o in own),
        loss=mean_interval(np.asarray(losses), (-1.0, 1.0)) if losses else None,
        ratio=fmean(o.cache["ratio"] for o in own),
        peak_ratio=fmean(o.cache["peak_bytes"] / o.cache["bf16_bytes"] for o in own),
        cells=cells,
    )


def _together(own: Sequence[Outcome], tasks: Sequence[Score], full: Mapping[str, float]) -> Score:
    """All tasks, each weighing the same: an item counts in proportion to the inverse of its task's number of items."""
    whole = _score(ALL, own, full)
    loss = None
    if whole.loss is not None:
        weight = {t.task: len(own) / (len(tasks) * t.items) for t in tasks}
        losses = [weight[o.item.task] * (full[o.item.name] - o.score) for o in own if o.item.name in full]
        loss = mean_interval(np.asarray(losses), (-1.0, 1.0))
    mean = fmean(t.score for t in tasks)
    return Score(whole.kv, whole.visible, ALL, whole.items, mean, loss, whole.ratio, whole.peak_ratio, whole.cells)


def seen(visible: bool) -> str:
    """How reports call the two ways of asking."""
    return "question visible" if visible else "question hidden"


def retrieval_rows(scores: Sequence[Score]) -> list[Row]:
    """Figures for a results file."""
    found = []
    for s in scores:
        what = f"{s.kv}, {seen(s.visible)}, {s.task}"
        found.append(Row(what=f"{what}: score", value=100 * s.score, unit="%"))
        if s.loss is not None and s.kv != FULL:
            found.append(Row(what=f"{what}: loss against full", value=100 * s.loss.value, unit="points"))
        if s.task == ALL:
            found.append(Row(what=f"{what}: physical bytes", value=s.ratio, unit="of bf16"))
    return found


def retrieval_sections(scores: Sequence[Score], outcomes: Sequence[Outcome]) -> dict[str, str]:
    """The Markdown of a report: a table for each way of asking, and the items that a setting lost or won."""
    sections = {}
    for visible in dict.fromkeys(s.visible for s in scores):
        own = [s for s in scores if s.visible == visible]
        sections[f"Scores, {seen(visible)} when the context is sifted"] = _table(own)
    sections["Items that changed"] = _flips(outcomes)
    return sections


def _table(scores: Sequence[Score]) -> str:
    tasks = list(dict.fromkeys(s.task for s in scores))
    rows = []
    for kv in dict.fromkeys(s.kv for s in scores):
        own = {s.task: s for s in scores if s.kv == kv}
        whole = own[ALL]
        loss = "-" if whole.loss is None or kv == FULL else with_bounds(whole.loss.scaled(100), 3, sign=True)
        cells = [f"{100 * own[t].score:.1f}" for t in tasks]
        rows.append([kv, f"{whole.ratio:.1%}", f"{whole.peak_ratio:.1%}", loss, *cells])
    note = "Scores in percent. Loss against full: points over all tasks, paired by item, 95 % bootstrap interval."
    return f"{markdown_table(['setting', 'physical', 'peak', 'loss', *tasks], rows)}\n\n{note}"


def _flips(outcomes: Sequence[Outcome]) -> str:
    full = {(o.visible, o.item.name): o for o in outcomes if o.kv == FULL}
    rows = []
    for o in outcomes:
        before = full.get((o.visible, o.item.name))
        if before is not None and abs(before.score - o.score) > 1e-9:
            scores = [f"{before.score:.2f}", f"{o.score:.2f}"]
            rows.append([o.kv, seen(o.visible), o.item.name, *scores, o.output.strip()[:60]])
    if not rows:
        return "None."
    return markdown_table(["setting", "asked", "item", "full", "setting's", "output"], rows, left=3)


def retrieval_data(scores: Iterable[Score], outcomes: Iterable[Outcome], about: Mapping[str, Any]) -> dict[str, Any]:
    """What the results file keeps beside its rows. about: how it was measured."""
    items = [
        {"kv": o.kv, "item": o.item.name, "visible": o.visible, "score": o.score, "output": o.output} for o in outcomes
    ]
    return {**about, "scores": [asdict(s) for s in scores], "items": items}
