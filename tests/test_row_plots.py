"""Pictures of results files' rows."""

from pathlib import Path
from typing import Any

import pytest

from siftkv.benchmarks import row_plots
from siftkv.benchmarks.results import ResultsFile, Row
from siftkv.errors import SiftKVError

ROWS = [
    Row(what="fast", value=0.96, unit="of the ceiling", bar=">= 0.95"),
    Row(what="slow", value=0.5, unit="of the ceiling", bar=">= 0.95"),
    Row(what="many", value=13460, unit="tokens/s"),
    Row(what="none", value=None, unit="tokens/s"),
    Row(what="yes", value=True),
]


def drawn(rows: list[Row], monkeypatch: pytest.MonkeyPatch, path: Path) -> Any:
    """The figure that was saved."""
    figures = []
    monkeypatch.setattr(row_plots, "save_figure", lambda figure, *_: figures.append(figure))
    row_plots.plot_rows(rows, path, "title")
    return figures[0]


def test_a_panel_a_unit_with_marks_and_colours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shares, speed = drawn(ROWS, monkeypatch, tmp_path / "rows.png").axes
    assert [bar.get_width() for bar in shares.patches] == [0.96, 0.5]
    assert shares.patches[0].get_facecolor() != shares.patches[1].get_facecolor()
    assert [list(line.get_xdata()) for line in shares.lines] == [[0.95, 0.95]] * 2
    assert [label.get_text() for label in shares.get_yticklabels()] == ["fast", "slow"]
    assert [text.get_text() for text in speed.texts] == ["13,460"]
    assert not speed.lines


def test_a_value_far_beyond_the_marks_gets_a_logarithmic_panel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    near, far = Row(what="near", value=0.5, unit="ms", bar="<= 0.7"), Row(what="far", value=573.0, unit="ms")
    (panel,) = drawn([near, far], monkeypatch, tmp_path / "rows.png").axes
    assert panel.get_xscale() == "log"
    assert panel.get_xlim()[0] < 0.5
    (panel,) = drawn([near, near], monkeypatch, tmp_path / "rows.png").axes
    assert panel.get_xscale() == "linear"


def test_redraw_writes_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    ResultsFile(name="step", command="siftkv bench step", rows=ROWS).write(path)
    assert row_plots.redraw(path).read_bytes().startswith(b"\x89PNG")
    assert row_plots.title_of(ResultsFile.read(path)).endswith("orange: missed")


def test_rows_without_numbers_still_give_a_picture(tmp_path: Path) -> None:
    row_plots.plot_rows([Row(what="yes", value=True)], tmp_path / "rows.png", "title")
    assert (tmp_path / "rows.png").exists()
    with pytest.raises(SiftKVError, match="cannot write the picture"):
        row_plots.plot_rows(ROWS, tmp_path / "rows.nonsense", "title")
