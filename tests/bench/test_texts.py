"""Benchmark texts: how they are read, and cut into windows."""

from __future__ import annotations

from pathlib import Path

import pytest

from siftkv.benchmarks.texts import Text, cut_windows, leading_tokens, read_text
from siftkv.data import TEXTS
from siftkv.errors import SiftKVError


class TestTexts:
    def test_lines_are_joined_with_nothing_between(self, tmp_path: Path) -> None:
        path = tmp_path / "two.jsonl"
        path.write_text('{"text": "one \\n"}\n\n{"text": " two", "id": 1}\n')
        assert read_text(path) == Text("two", "one \n two")

    def test_plain_text_and_shipped_text(self, tmp_path: Path) -> None:
        path = tmp_path / "plain.txt"
        path.write_text("as it is\n", "utf-8")
        assert read_text(path) == Text("plain", "as it is\n")
        assert "Sherlock Holmes" in read_text(TEXTS[0]).text

    @pytest.mark.parametrize(
        "content", ['{"text": "a"}\n{"title": "b"}', '{"text": "a"}\nnot json', '{"text": "a"}\n{"text": 3}']
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(content)
        with pytest.raises(SiftKVError, match="line 2"):
            read_text(path)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SiftKVError, match=r"nowhere\.txt"):
            read_text(tmp_path / "nowhere.txt")

    def test_windows_start_at_fixed_offsets(self) -> None:
        assert cut_windows(list(range(100)), [], "t", 5, 3, 10, 7) == [list(range(s, s + 5)) for s in (7, 17, 27)]
        assert cut_windows(list(range(100)), [-1], "t", 5, 2, 4) == [[-1, 0, 1, 2, 3], [-1, 4, 5, 6, 7]]

    def test_the_last_window_may_end_with_the_text_but_not_after(self) -> None:
        assert cut_windows(list(range(25)), [], "t", 5, 3, 10)[-1] == [20, 21, 22, 23, 24]
        with pytest.raises(SiftKVError, match="t has 24 tokens"):
            cut_windows(list(range(24)), [], "t", 5, 3, 10)

    def test_leading_tokens_are_those_of_the_tokenizer(self) -> None:
        class Stub:
            bos_token_id = 1

            def __init__(self, ids: list[int]) -> None:
                self.ids = ids

            def __call__(self, text: str) -> dict[str, list[int]]:
                return {"input_ids": self.ids}

        assert leading_tokens(Stub([1, 7])) == [1]
        assert leading_tokens(Stub([7])) == []
