"""Accuracy and its price: paired with the full cache, problem by problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from siftkv.benchmarks.results import Row
from siftkv.evaluate.bootstrap import Interval, mean_interval, upper_bound
from siftkv.evaluate.report import markdown_table, with_bounds
from siftkv.evaluate.tasks.run import Answer

ALL = "all tasks"
FULL = "full"


@dataclass(frozen=True)
class Loss:
    """Accuracy of full minus that of a setting, paired by problem, 0 to 1, over what both answered.

    bound: one-sided 95 % upper bound. length_ratio: mean output length by that of full.
    """

    loss: Interval
    bound: float
    length_ratio: float


@dataclass(frozen=True)
class TaskScore:
    """One setting on one task, or all problems together. answers: how many. accuracy: mean over problems, 0 to 1.

    against_full: None without full. mean_tokens: of an answer. truncated, invalid: shares of answers cut at the limit,
    and without an answer in the asked form. solved_per_minute: by the engine's time. ratio, peak_ratio: physical bytes
    at the end and at most, of bf16. per_live_entry: bytes of one key and value of one head, everything included.
    """

    kv: str
    task: str
    problems: int
    answers: int
    accuracy: Interval
    against_full: Loss | None
    mean_tokens: float
    truncated: float
    invalid: float
    solved_per_minute: float
    ratio: float
    peak_ratio: float
    peak_bytes: float
    per_live_entry: float


@dataclass(frozen=True)
class Flip:
    """An answer that is right under one of `full` and a setting only. lost: it was right under full."""

    kv: str
    task: str
    problem: str
    repeat: int
    lost: bool
    full_answer: str
    answer: str


def summarise(answers: Sequence[Answer]) -> list[TaskScore]:
    """By setting: all problems together where there are several tasks, then each task."""
    found = []
    for kv in dict.fromkeys(a.kv for a in answers):
        own = [a for a in answers if a.kv == kv]
        full = [a for a in answers if a.kv == FULL]
        tasks = list(dict.fromkeys(a.task for a in own))
        found += [_score(kv, ALL, own, full)] if len(tasks) > 1 else []
        found += [_score(kv, t, [a for a in own if a.task == t], [a for a in full if a.task == t]) for t in tasks]
    return found


def _score(kv: str, task: str, own: Sequence[Answer], full: Sequence[Answer]) -> TaskScore:
    accuracy, reference = _by_problem(own), _by_problem(full)
    seconds = sum(a.seconds for a in own)
    return TaskScore(
        kv=kv,
        task=task,
        problems=len(accuracy),
        answers=len(own),
        accuracy=mean_interval(np.asarray(list(accuracy.values()))),
        against_full=_loss(own, full, accuracy, reference),
        mean_tokens=fmean(a.tokens for a in own),
        truncated=fmean(a.truncated for a in own),
        invalid=fmean(not a.valid for a in own),
        solved_per_minute=60 * sum(a.correct for a in own) / seconds if seconds else 0.0,
        ratio=fmean(a.cache["ratio"] for a in own),
        peak_ratio=fmean(a.cache["peak_bytes"] / a.cache["bf16_bytes"] for a in own),
        peak_bytes=max(a.cache["peak_bytes"] for a in own),
        per_live_entry=fmean(a.cache["bytes_per_live_token"] for a in own),
    )


def _by_problem(answers: Sequence[Answer]) -> dict[tuple[str, str], float]:
    """Share of right answers of each problem, over its repeats."""
    right: dict[tuple[str, str], list[bool]] = {}
    for a in answers:
        right.setdefault((a.task, a.problem), []).append(a.correct)
    return {key: fmean(values) for key, values in right.items()}


def _loss(
    own: Sequence[Answer],
    full: Sequence[Answer],
    accuracy: Mapping[tuple[str, str], float],
    reference: Mapping[tuple[str, str], float],
) -> Loss | None:
    both = [key for key in accuracy if key in reference]
    if not both:
        return None
    losses = np.asarray([reference[key] - accuracy[key] for key in both])
    lengths = [fmean(a.tokens for a in part if (a.task, a.problem) in set(both)) for part in (own, full)]
    return Loss(mean_interval(losses, (-1.0, 1.0)), upper_bound(losses), lengths[0] / lengths[1] if lengths[1] else 1.0)


def flips(answers: Sequence[Answer]) -> list[Flip]:
    """Every answer that a setting turned, lost ones first."""
    full = {(a.task, a.problem, a.repeat): a for a in answers if a.kv == FULL}
    found = []
    for a in answers:
        before = full.get((a.task, a.problem, a.repeat))
        if before is not None and before.correct != a.correct:
            found.append(Flip(a.kv, a.task, a.problem, a.repeat, before.correct, before.answer, a.answer))
    order = {kv: i for i, kv in enumerate(dict.fromkeys(a.kv for a in answers))}
    return sorted(found, key=lambda f: (order[f.kv], not f.lost))


def task_rows(scores: Sequence[TaskScore]) -> list[Row]:
    """Figures for a results file."""
    found = []
    for s in scores:
        what = f"{s.kv}, {s.task}"
        found.append(Row(what=f"{what}: accuracy", value=100 * s.accuracy.value, unit="%"))
        if s.against_full is not None and s.kv != FULL:
            found += [
                Row(what=f"{what}: loss", value=100 * s.against_full.loss.value, unit="points"),
                Row(what=f"{what}: loss, one-sided 95 % bound", value=100 * s.against_full.bound, unit="points"),
                Row(what=f"{what}: output length", value=s.against_full.length_ratio, unit="x full"),
            ]
        found += [
            Row(what=f"{what}: solved", value=s.solved_per_minute, unit="1/min"),
            Row(what=f"{what}: physical bytes", value=s.ratio, unit="of bf16"),
            Row(what=f"{what}: peak bytes", value=s.peak_ratio, unit="of bf16"),
        ]
    return found


def task_sections(scores: Sequence[TaskScore], flipped: Sequence[Flip]) -> dict[str, str]:
    """The Markdown of a report: a table a task, then the flipped answers."""
    sections = {task: _table([s for s in scores if s.task == task]) for task in dict.fromkeys(s.task for s in scores)}
    rows = [
        [f.kv, f.task, f.problem, str(f.repeat), "lost" if f.lost else "won", f.full_answer[:40], f.answer[:40]]
        for f in flipped
    ]
    header = ["setting", "task", "problem", "repeat", "", "answer under full", "answer"]
    return sections | {"Flipped answers": markdown_table(header, rows, left=7) if rows else "None."}


def _table(scores: Sequence[TaskScore]) -> str:
    header = ["setting", "accuracy, %", "loss, points", "bound", "tokens", "x full", "cut", "invalid", "solved/min"]
    rows = []
    for s in scores:
        against = s.against_full if s.kv != FULL else None
        loss = [with_bounds(against.loss.scaled(100), 3, sign=True), f"{100 * against.bound:+.2f}"] if against else []
        length = f"{against.length_ratio:.3f}" if against else "-"
        shares = [f"{s.truncated:.1%}", f"{s.invalid:.1%}", f"{s.solved_per_minute:.2f}"]
        size = [f"{s.ratio:.1%}", f"{s.peak_ratio:.1%}", f"{s.per_live_entry:.1f}"]
        accuracy = with_bounds(s.accuracy.scaled(100), 3)
        rows.append([s.kv, accuracy, *(loss or ["-", "-"]), f"{s.mean_tokens:.0f}", length, *shares, *size])
    note = (
        f"{scores[0].problems} problems, {scores[0].answers} answers a setting. Brackets: 95 % bootstrap intervals "
        "over problems; loss is paired with full, bound its one-sided 95 % upper bound. Bytes: of bf16, all included."
    )
    return f"{markdown_table([*header, 'physical', 'peak', 'B/entry'], rows)}\n\n{note}"


def task_data(
    scores: Sequence[TaskScore], flipped: Sequence[Flip], answers: Sequence[Answer], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What the results file keeps beside its rows; texts stay in the records. about: how it was measured."""
    kept = [{k: v for k, v in asdict(a).items() if k not in ("text", "cache")} for a in answers]
    return {
        **about,
        "scores": [asdict(s) for s in scores],
        "flips": [asdict(f) for f in flipped],
        "answers": kept,
    }
