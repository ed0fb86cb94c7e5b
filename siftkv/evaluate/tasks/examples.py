"""Worked examples before a problem, as earlier turns of the conversation: longer prompts, with something to sift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from siftkv.errors import SiftKVError
from siftkv.evaluate.tasks.base import Problem, read_rows


class ExampleRow(BaseModel):
    """A row of a file of examples, as a user asks and as an assistant should answer."""

    model_config = ConfigDict(extra="ignore")

    question: str
    answer: str


def with_examples(problems: Sequence[Problem], files: Mapping[str, str]) -> list[Problem]:
    """Problems with all examples of their task's file before them; those of other tasks as they are.

    files: path by task, each as `read_rows` takes it, with `question` and `answer`. Raises SiftKVError for a file that
    cannot be read, or a task without problems.
    """
    strangers = sorted(files.keys() - {problem.task for problem in problems})
    if strangers:
        raise SiftKVError(f"there are examples for {', '.join(strangers)} but no problems: name the task as well")
    turns = {
        task: tuple((row.question, row.answer) for row in read_rows(path, ExampleRow, None))
        for task, path in files.items()
    }
    return [replace(problem, examples=turns.get(problem.task, ())) for problem in problems]
