"""The tables of docs/results.md come from the committed results files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from siftkv.benchmarks.results import ResultsFile, Row
from siftkv.benchmarks.tables import BEGIN, END, FOLDER, PAGE, render, rewrite
from siftkv.errors import SiftKVError

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not (ROOT / PAGE).exists(), reason="only in a checkout")
def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text()
    assert rewrite(text, FOLDER) == text, "run python -m siftkv.benchmarks.tables"


def test_rendering(tmp_path: Path) -> None:
    rows = [
        Row(what="speed", value=1.25, unit="x", bar=">= 1"),
        Row(what="size", value=2.0, bar="<= 1"),
        Row(what="note", value=3),
    ]
    ResultsFile(name="trial", command="siftkv trial", rows=rows, data={}).write(tmp_path / "a.json")
    text = render(tmp_path)
    assert "| speed | 1.25 x | >= 1 | yes |" in text
    assert "| size | 2 " in text
    assert "**no**" in text
    assert "note" not in text, "figures without a bar stay in the file"
    assert rewrite(f"a {BEGIN} old {END} b", tmp_path) == f"a {BEGIN}\n{text}\n{END} b"
    with pytest.raises(SiftKVError, match=r"results\.md"):
        rewrite("nothing", tmp_path)
    assert os.listdir(tmp_path) == ["a.json"]
