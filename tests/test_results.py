"""Results files: their schema, the bars, and what is read back."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from siftkv import __version__
from siftkv.benchmarks.results import ResultsFile, Row
from siftkv.errors import SiftKVError

KEYS = {"name", "command", "date", "commit", "hardware", "versions", "rows", "data"}


def test_schema_of_a_written_file(tmp_path: Path) -> None:
    rows = [Row(what="bytes", value=0.29, unit="of bf16", bar="<= 0.3"), Row(what="answer", value="yes")]
    ResultsFile(name="demo", command="siftkv demo", rows=rows, data={"x": [1]}).write(tmp_path / "r.json")
    stored = json.loads((tmp_path / "r.json").read_text())
    assert set(stored) == KEYS
    assert stored["rows"] == [
        {"what": "bytes", "value": 0.29, "unit": "of bf16", "bar": "<= 0.3", "ok": True},
        {"what": "answer", "value": "yes", "unit": "", "bar": None, "ok": None},
    ]
    assert set(stored["hardware"]) == {"cpu", "cores", "memory_bytes", "gpu"}
    assert stored["hardware"]["cores"] >= 1
    assert stored["versions"]["siftkv"] == __version__
    assert {"python", "torch", "transformers", "numba", "numpy"} <= set(stored["versions"])
    assert stored["data"] == {"x": [1]}


@pytest.mark.parametrize(
    ("value", "bar", "ok"),
    [
        (0.3, "<= 0.3", True),
        (0.31, "<= 0.3", False),
        (5, ">= 5", True),
        (4.9, ">=5", False),
        (None, ">= 5", False),
        ("six", ">= 5", False),
        (math.nan, "<= 1", False),
        (math.nan, ">= 1", False),
        (7, None, None),
    ],
)
def test_bars(value: float | str | None, bar: str | None, ok: bool | None) -> None:
    assert Row(what="x", value=value, bar=bar).ok is ok


@pytest.mark.parametrize("bar", ["0.3", "< 0.3", "== 1", "<= much"])
def test_a_bar_without_direction_is_refused(bar: str) -> None:
    with pytest.raises(ValidationError):
        Row(what="x", value=1, bar=bar)


def test_a_file_is_ok_when_no_bar_is_missed() -> None:
    good, bad, free = Row(what="a", value=1, bar="<= 2"), Row(what="b", value=3, bar="<= 2"), Row(what="c", value=3)
    assert ResultsFile(name="n", command="c", rows=[good, free]).ok
    assert not ResultsFile(name="n", command="c", rows=[good, bad]).ok


def test_reading_back_never_believes_the_stored_ok(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    written = ResultsFile(name="n", command="c", rows=[Row(what="b", value=3, bar="<= 2")], data=math.inf)
    written.write(path)
    path.write_text(path.read_text().replace('"ok": false', '"ok": true'))
    found = ResultsFile.read(path)
    assert not found.ok
    assert found.data is None
    assert (found.date, found.hardware) == (written.date, written.hardware)


def test_unwritable_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(SiftKVError, match="cannot write"):
        ResultsFile(name="n", command="c").write(tmp_path / "nowhere" / "r.json")
    with pytest.raises(SiftKVError, match="cannot read"):
        ResultsFile.read(tmp_path / "r.json")
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(SiftKVError, match="cannot read"):
        ResultsFile.read(tmp_path / "r.json")


def test_commit_is_that_of_the_source_tree_or_none() -> None:
    found = ResultsFile(name="n", command="c").commit
    here = Path(__file__).parent
    head = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert found is None or found.removesuffix("+dirty") == head.stdout.strip()
