"""What a load asks for, and when: prompts from a file, from stories or at random, and Poisson arrivals."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from siftkv.benchmarks.serve_load import Work
from siftkv.benchmarks.texts import read_text
from siftkv.data import TEXTS
from siftkv.errors import SiftKVError


def poisson_times(rate: float, count: int, generator: random.Random) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second on average; infinity = all at once."""
    if math.isinf(rate):
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        now += generator.expovariate(rate)
        times.append(now)
    return times


def file_prompts(path: str | Path, max_tokens: int) -> list[Work]:
    """Prompts of a file: `.jsonl` with `prompt` and, where it has one, `max_tokens` in each line, else a prompt a line.

    Raises SiftKVError that names the line that cannot be read.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SiftKVError(f"cannot read {path}: give a file of prompts, .jsonl or one a line") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line) if str(path).endswith(".jsonl") else {"prompt": line}
            found.append(Work(entry["prompt"], int(entry.get("max_tokens", max_tokens))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SiftKVError(f"line {number} of {path} is not a JSON object with a prompt") from error
    if not found:
        raise SiftKVError(f"{path} holds no prompts")
    return found


def story_prompts(count: int, words: int, max_tokens: int, generator: random.Random) -> list[Work]:
    """Prompts of `words` words each, cut from the shipped stories at random places."""
    story = " ".join(read_text(name).text for name in TEXTS).split()
    if not 1 <= words <= len(story):
        raise SiftKVError(f"prompts of {words} words: the shipped stories have 1 to {len(story)}")
    starts = [generator.randrange(len(story) - words + 1) for _ in range(count)]
    return [Work(" ".join(story[start : start + words]), max_tokens) for start in starts]


def random_id_prompts(count: int, length: int, vocab: int, max_tokens: int, generator: random.Random) -> list[Work]:
    """Prompts of exactly `length` random token ids from 1 to `vocab - 1`, for models whose text means nothing."""
    if length < 1 or vocab < 2:
        raise SiftKVError("random prompts need at least one token and a vocabulary of at least two")
    return [Work([generator.randrange(1, vocab) for _ in range(length)], max_tokens) for _ in range(count)]
