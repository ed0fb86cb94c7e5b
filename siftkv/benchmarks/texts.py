"""Texts to measure on, and the token windows that are cut from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siftkv.data import TEXTS
from siftkv.data import read_text as read_shipped
from siftkv.errors import SiftKVError


@dataclass(frozen=True)
class Text:
    """A text and what to call it in results."""

    name: str
    text: str


def read_text(source: str | Path) -> Text:
    """A shipped text by its name, or a file: `.jsonl` whose `text` fields are joined with nothing between, else plain.

    Raises SiftKVError that names the file, and the line, that cannot be read.
    """
    if str(source) in TEXTS:
        return Text(str(source), read_shipped(str(source)))
    path = Path(source)
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SiftKVError(
            f"cannot read {path}: {reason}; give a .txt or .jsonl file, or one of {', '.join(TEXTS)}"
        ) from error
    return Text(path.stem, _join_lines(path, content) if path.suffix == ".jsonl" else content)


def _join_lines(path: Path, content: str) -> str:
    parts = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            part = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise SiftKVError(f"line {number} of {path} is not a JSON object with a text field") from error
        if not isinstance(part, str):
            raise SiftKVError(f"the text field in line {number} of {path} is not a string")
        parts.append(part)
    return "".join(parts)


def tokenize(tokenizer: Any, text: Text) -> list[int]:
    """Token ids of a whole text, without special tokens."""
    return list(tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"])


def leading_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text: `[bos]` or nothing."""
    first = tokenizer("a")["input_ids"][:1]
    return list(first) if first and first[0] == tokenizer.bos_token_id else []


def cut_windows(
    ids: list[int], lead: list[int], name: str, length: int, count: int, stride: int, offset: int = 0
) -> list[list[int]]:
    """`count` windows of `length` tokens; window `i` starts at token `offset + i * stride` of the text.

    lead: begins every window and counts towards its length. Raises SiftKVError when the text ends before the last
    window does.
    """
    body = length - len(lead)
    end = offset + (count - 1) * stride + body
    if end > len(ids):
        raise SiftKVError(
            f"{name} has {len(ids)} tokens and {count} windows of {length} tokens need {end}: "
            "ask for fewer or shorter windows, or give a longer text"
        )
    starts = range(offset, offset + count * stride, stride)
    return [[*lead, *ids[start : start + body]] for start in starts]
