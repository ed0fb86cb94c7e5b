"""Choices of algorithms for products: how they are kept and found. That they compute is tested on a GPU."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest

from siftkv.kernels.cuda import cublas, products
from siftkv.kernels.cuda.choices import ChoiceFile
from siftkv.kernels.cuda.cublas import Algorithm


def algorithm(number: int) -> Algorithm:
    return Algorithm((ctypes.c_uint64 * 8)(number, *range(7)))


def test_an_algorithm_survives_as_text() -> None:
    text = algorithm(1 << 63).text
    assert len(text) == 128
    again = Algorithm.parse(text)
    assert list(again.words) == [1 << 63, *range(7)]
    assert again.text == text
    with pytest.raises(ValueError, match="uffer"):
        Algorithm.parse(text[:-2])


def test_structures_have_the_sizes_of_the_library() -> None:
    assert ctypes.sizeof(Algorithm) == 64
    assert ctypes.sizeof(cublas._Found) == 64 + 8 + 4 + 4 + 16


def test_choices_are_found_again_and_the_first_written_holds(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "choices.json"
    first, second = ChoiceFile(path), ChoiceFile(path)
    first.add("a", "64", "x")
    first.add("a", "8+", None)
    second.add("a", "64", "y")
    second.add("b", "64", "z")
    assert first.write()
    assert second.write()
    for file in (second, ChoiceFile(path)):
        assert [file.find(*at) for at in (("a", "64"), ("a", "8+"), ("b", "64"), ("c", "64"))] == ["x", None, "z", None]
        assert [file.knows(*at) for at in (("a", "64"), ("a", "8+"), ("a", "16"), ("c", "64"))] == [
            True,
            True,
            False,
            False,
        ]
    assert list(tmp_path.rglob("*")) == [path.parent, path]


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_damaged_file_counts_as_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "choices.json"
    path.write_text(content)
    file = ChoiceFile(path)
    file.add("a", "64", "x")
    assert file.write()
    assert json.loads(path.read_text()) == {"a": {"64": "x"}}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not ChoiceFile(tmp_path / "file" / "choices.json").write()


def test_steps_match_by_their_rows_and_prompts_from_some_rows_on() -> None:
    one, two, three = map(algorithm, (1, 2, 3))
    choices = products._Choices({64: one, 128: None}, {1024: two, 4096: three})
    found = {rows: choices.find(rows) for rows in (3, 64, 65, 128, 1023, 1024, 4095, 4096, 100_000)}
    expected = {3: None, 64: one, 65: None, 128: None, 1023: None, 1024: two, 4095: two, 4096: three, 100_000: three}
    assert found == expected


def test_what_matters_most_is_measured_first() -> None:
    order = products._order([1, 2, 4, 8, 16, 24, 192])
    assert order[0] == (192, True)
    assert order[1:5] == [(8192, False), (4096, False), (2048, False), (1024, False)]
    assert sorted(rows for rows, exact in order if exact) == [1, 2, 4, 8, 16, 24, 192]
    assert len(order) == len(set(order))
