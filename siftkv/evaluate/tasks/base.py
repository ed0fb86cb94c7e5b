"""What a task is: problems to ask, and a judge of what comes back."""

from __future__ import annotations

import gzip
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError

from siftkv.errors import SiftKVError

Row = TypeVar("Row", bound=BaseModel)


@dataclass(frozen=True)
class Problem:
    """One problem. message: what a user asks in a chat. plain: the same for a model without a chat template, with the
    strings that end its answer. gold: what the judge needs. examples: (question, answer) of worked ones before it.
    """

    task: str
    name: str
    message: str
    plain: str
    stop: tuple[str, ...] = ()
    gold: Mapping[str, Any] = field(default_factory=dict)
    examples: tuple[tuple[str, str], ...] = ()

    def turns(self) -> list[dict[str, str]]:
        """The conversation that asks it."""
        said = [text for pair in self.examples for text in pair]
        roles = ["user", "assistant"] * len(self.examples) + ["user"]
        return [{"role": role, "content": text} for role, text in zip(roles, [*said, self.message], strict=True)]

    def text(self) -> str:
        """The same for a model without a chat template."""
        return "".join(f"{question}\n{answer}\n\n" for question, answer in self.examples) + self.plain


@dataclass(frozen=True)
class Judgement:
    """correct: solved. valid: an answer in the asked form was there. answer: what was read, for people."""

    correct: bool
    valid: bool
    answer: str


class Task(ABC):
    """A kind of problem."""

    name: ClassVar[str]
    needs_file: ClassVar[bool] = True
    module: ClassVar[str] = ""
    """A module of the extra `eval` that the judge needs."""

    @abstractmethod
    def problems(self, path: str | None, limit: int | None, seed: int) -> list[Problem]:
        """The first `limit` problems of a file, or made from a seed. Raises SiftKVError for a file of another kind."""

    @abstractmethod
    def judge(self, problem: Problem, text: str, truncated: bool, chat: bool) -> Judgement:
        """Judge an answer. truncated: it was cut at the token limit. chat: it answers `message`, else `plain`."""


def read_rows(path: str, kind: type[Row], limit: int | None) -> list[Row]:
    """The first `limit` rows of a .jsonl, .jsonl.gz or .json (list) file.

    Raises SiftKVError that names the file, and the row, that cannot be read.
    """
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SiftKVError(f"cannot read {path}: it is not a whole gzip file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SiftKVError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        ) from error
    rows: list[Row] = []
    for number, value in enumerate(_values(path, text), 1):
        if limit is not None and len(rows) >= limit:
            break
        try:
            rows.append(kind.model_validate(value))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "row"
            raise SiftKVError(f"row {number} of {path}: {where}: {first['msg'].lower()}") from error
    if not rows:
        raise SiftKVError(f"{path} holds no problems")
    return rows


def _values(path: str, text: str) -> list[Any]:
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise SiftKVError(f"{path} is neither JSON lines nor a JSON list: {error}") from error


def after_thinking(text: str) -> str:
    """The answer proper: what follows the end of a reasoning model's thoughts."""
    return text.rpartition("</think>")[2]


def code_blocks(text: str) -> list[str]:
    """Contents of fenced blocks, in order; a last one that was cut off counts."""
    parts = text.split("```")
    return [part.partition("\n")[2] if "\n" in part else part for part in parts[1::2]]
