"""What an evaluation leaves in its folder: results.json, report.md and pictures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siftkv.benchmarks.results import ResultsFile, Row
from siftkv.errors import SiftKVError
from siftkv.evaluate.bootstrap import Interval

RESULTS = "results.json"
REPORT = "report.md"
RECORDS = "records.jsonl"


@dataclass
class Report:
    """One evaluation. rows: figures of the results file. data: what it keeps beside them.

    sections: Markdown by heading, in order. pictures: what each shows, by file name.
    """

    name: str
    title: str
    rows: list[Row]
    data: Mapping[str, Any]
    sections: Mapping[str, str]
    pictures: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: str | Path) -> None:
        """Write both files; pictures are drawn by others. Raises SiftKVError when the folder cannot be written."""
        command = shlex.join(["siftkv", *sys.argv[1:]])
        result = ResultsFile(name=self.name, command=command, rows=self.rows, data=dict(self.data))
        result.write(Path(folder) / RESULTS)
        machine = ", ".join([result.hardware.cpu, *(result.hardware.gpu or [])])
        parts = [f"# {self.title}", f"{result.date}, {machine}, commit {result.commit or 'unknown'}:\n`{command}`"]
        parts += [f"## {heading}\n\n{text}" for heading, text in self.sections.items()]
        parts += [f"## {what}\n\n![{what}]({file})" for file, what in self.pictures.items()]
        path = Path(folder) / REPORT
        try:
            path.write_text("\n\n".join(parts) + "\n", "utf-8")
        except OSError as error:
            raise SiftKVError(f"cannot write {path}: {error.strerror or error}") from error


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are aligned to the left, the others to the right."""
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    marks = [":--" if i < left else "--:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, marks, *escaped])


def with_bounds(figure: Interval, digits: int = 4, sign: bool = False) -> str:
    """`0.0123 [0.0110, 0.0140]`, to `digits` significant digits."""
    plus = "+" if sign else ""
    return f"{figure.value:{plus}.{digits}g} [{figure.low:{plus}.{digits}g}, {figure.high:{plus}.{digits}g}]"


def cache_fields(report: Mapping[str, Any]) -> dict[str, Any]:
    """What records keep of a `KVReport.to_dict()`: everything but the counts by head, which would be nearly all."""
    return {key: value for key, value in report.items() if key != "per_head_tokens"}
