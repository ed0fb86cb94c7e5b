"""Words to be counted over the whole context: those that stand most often in a list, or in coded text."""

from __future__ import annotations

import random

from siftkv.evaluate.retrieval.items import Haystack, Item

_COMMON = 10
_RARE_TIMES = 3
_TOP = 3
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LONG = 4096
"""Tokens from which on common words stand 30 times instead of 10, as in RULER."""


def common_words(hay: Haystack, rng: random.Random, length: int, sample: int) -> Item:
    """A numbered list in which ten words stand far more often than all others."""
    words = hay.words.copy()
    rng.shuffle(words)
    common, rare = words[:_COMMON], words[_COMMON:]
    seed, times = rng.random(), 30 if length >= _LONG else 10

    def build(count: int) -> str:
        entries = common * times + [rare[i % len(rare)] for i in range(count)] * _RARE_TIMES
        random.Random(seed).shuffle(entries)
        return " ".join(f"{i}. {word}" for i, word in enumerate(entries, 1))

    question = f"What are the {_COMMON} words that appear most often in the list above?"
    lead = f"The {_COMMON} words that appear most often in the list are:"
    context = f"Below is a numbered list of words. Some appear far more often than others.\n\n{hay.fit(build, length)}"
    return Item("common_words", length, None, sample, context, question, lead, tuple(common), 100)


def frequent_words(hay: Haystack, rng: random.Random, length: int, sample: int) -> Item:
    """Coded words whose counts fall as one over the square of their rank; the first three are asked for."""
    coded = ["".join(rng.choice(_LETTERS) for _ in range(6)) for _ in range(200)]
    seed, total = rng.random(), sum(rank**-2 for rank in range(1, len(coded) + 1))

    def build(count: int) -> str:
        entries = [w for rank, w in enumerate(coded, 1) for _ in range(round(count * rank**-2 / total))]
        random.Random(seed).shuffle(entries)
        return " ".join(entries)

    question = f"What are the {_TOP} words that appear most often in the coded text above?"
    lead = f"The {_TOP} words that appear most often in the coded text are:"
    text = hay.fit(build, length, least=40)
    context = f"Below is a coded text. Its words mean nothing; only how often each appears counts.\n\n{text}"
    return Item("frequent_words", length, None, sample, context, question, lead, tuple(coded[:_TOP]), 50)
