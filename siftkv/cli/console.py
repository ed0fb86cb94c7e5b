"""What commands say on stderr, and the helpers to say it: stdout is for results only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from siftkv import LLM, KVReport

_UNITS = ("B", "kB", "MB", "GB", "TB")


def stderr_console() -> Console:
    """A console on the stderr of now, which a test or a shell may have replaced."""
    return Console(stderr=True, highlight=False)


def stdout_console() -> Console:
    """A console on the stdout of now; wide enough for any table where stdout is a file or a pipe."""
    width = None if sys.stdout.isatty() else 200
    return Console(highlight=False, width=width)


def say(text: str) -> None:
    """One line of information on stderr."""
    print(text, file=sys.stderr, flush=True)


def plain_table(title: str | None = None, gap: int = 2) -> Table:
    """An empty table in the style that all commands share; `gap` blanks stand between columns."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1, 0, 0))
    table.title_justify, table.title_style, table.header_style = "left", "bold", "bold"
    return table


@contextmanager
def busy(text: str) -> Iterator[None]:
    """A spinner on stderr while something of unknown length runs; nothing where stderr is no terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield
        return
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        bar.add_task(text, total=None)
        yield


class Counter:
    """A context manager: a bar on stderr that counts to a total and leaves no trace; none where that is no terminal.

    remaining: also show about how long it still takes.
    """

    def __init__(self, text: str, total: int, remaining: bool = False) -> None:
        console = stderr_console()
        columns: list[ProgressColumn] = [
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        ]
        if remaining:
            columns += [TextColumn("about"), TimeRemainingColumn(), TextColumn("left")]
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(text, total=total)

    def __enter__(self) -> Counter:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, count: int = 1, text: str | None = None) -> None:
        """Count on; `text` replaces what stands before the bar."""
        self._bar.update(self._task, advance=count, description=text)


def fetched(model: str) -> Path:
    """The folder of a built-in model, fetched when it is not there yet; any other name as a path."""
    with busy("Starting"):
        from siftkv.models import list_models, pull
    return pull(model) if model in [m.name for m in list_models()] else Path(model)


def open_llm(model: str, **settings: Any) -> LLM:
    """`LLM(model, **settings)` with progress on stderr."""
    with busy("Starting"):
        from siftkv import LLM
    fetched(model)
    with busy(f"Loading {model}"):
        return LLM(model, **settings)


def size(count: float) -> str:
    """Bytes as people read them: 23.4 MB."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {_UNITS[-1]}"


def tier_shares(report: KVReport) -> dict[str, float]:
    """Share of all entries in each tier, 0 to 1, without formats that hold nothing."""
    total = sum(report.tokens_by_tier.values()) or 1
    return {tier: count / total for tier, count in report.tokens_by_tier.items() if count}


def kv_line(report: KVReport) -> str:
    """One line about what a KV cache cost."""
    shares = ", ".join(f"{tier} {share:.0%}" for tier, share in tier_shares(report).items())
    held, plain = size(report.physical_bytes), size(report.bf16_bytes)
    return (
        f"KV cache: {held} physical, {report.ratio:.1%} of the {plain} of bf16, "
        f"for {report.tokens_seen} tokens ({shares})"
    )


def check_writable(path: str | None) -> None:
    """Raise SiftKVError, before anything slow runs, for a file that cannot be written; None and `-` are always fine."""
    if path is None or path == "-":
        return
    target = Path(path)
    place = target if target.exists() else target.absolute().parent
    if target.is_dir() or not os.access(place, os.W_OK):
        raise SiftKVError(f"cannot write {path}: it is a folder, or its folder is missing or may not be written")


def write_text(path: str, text: str) -> None:
    """Write a file, or stdout where `path` is `-`. Raises SiftKVError when it cannot be written."""
    if path == "-":
        print(text, end="", flush=True)
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SiftKVError(f"cannot write {path}: {error.strerror or error}") from error
