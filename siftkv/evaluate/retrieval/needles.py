"""Sentences hidden in a text: one needle, one among several keys, several values of one key, chains of variables."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from siftkv.evaluate.retrieval.items import Haystack, Item, invented_name

_KEYS = 4
_VALUES = 4
_HOPS = 4
_ASK = "A special magic number is hidden in the text above."


def single_needle(hay: Haystack, rng: random.Random, length: int, depth: float, sample: int) -> Item:
    """One key and its number, `depth` of the way into a text."""
    key, value = invented_name(rng), _number(rng)
    context = _hidden(hay, rng, length, [(depth, _sentence(key, value))])
    return Item("single_needle", length, depth, sample, context, _question(key), _lead(key), (value,), 24)


def multi_key(hay: Haystack, rng: random.Random, length: int, depth: float, sample: int) -> Item:
    """Several keys with a number each; the one asked for lies at `depth`."""
    keys = _distinct(rng, invented_name, _KEYS)
    values = _distinct(rng, _number, _KEYS)
    places = [depth, *(rng.random() for _ in keys[1:])]
    needles = [(place, _sentence(key, value)) for place, key, value in zip(places, keys, values, strict=True)]
    context = _hidden(hay, rng, length, needles)
    return Item("multi_key", length, depth, sample, context, _question(keys[0]), _lead(keys[0]), (values[0],), 24)


def multi_needle(hay: Haystack, rng: random.Random, length: int, sample: int) -> Item:
    """Several numbers of one key, all of which are asked for."""
    key, values = invented_name(rng), _distinct(rng, _number, _VALUES)
    context = _hidden(hay, rng, length, [(rng.random(), _sentence(key, value)) for value in values])
    question = f"What are all the special magic numbers for {key} mentioned in the text above?"
    lead = f"The special magic numbers for {key} mentioned in the text are"
    return Item("multi_needle", length, None, sample, context, question, lead, tuple(values), 80)


def variable_tracking(hay: Haystack, rng: random.Random, length: int, sample: int) -> Item:
    """A chain of variables that take one another's value, in order along the text."""
    names = _distinct(rng, lambda r: "".join(r.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5)), _HOPS + 1)
    value = str(rng.randrange(10000, 100000))
    sources = [value, *(f"VAR {name}" for name in names)]
    lines = [f"VAR {name} = {source}." for name, source in zip(names, sources)]
    places = sorted(rng.random() for _ in lines)
    context = _hidden(hay, rng, length, list(zip(places, lines, strict=True)))
    question = f"Find all variables that are assigned the value {value} in the text above, directly or through others."
    lead = f"The {len(names)} variables that are assigned the value {value} are:"
    return Item("variable_tracking", length, None, sample, context, question, lead, tuple(names), 60)


def _hidden(hay: Haystack, rng: random.Random, length: int, needles: Sequence[tuple[float, str]]) -> str:
    """A text of `length` tokens with each needle at its depth, 0 to 1."""
    start = hay.start(rng)
    ordered = sorted(needles, key=lambda needle: needle[0], reverse=True)

    def build(count: int) -> str:
        sentences = hay.take(count, start)
        for depth, needle in ordered:  # from the end, so that earlier places stay where they are
            sentences.insert(round(depth * count), needle)
        return " ".join(sentences)

    return hay.fit(build, length)


def _distinct(rng: random.Random, draw: Callable[[random.Random], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def _sentence(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


def _question(key: str) -> str:
    return f"{_ASK} What is the special magic number for {key}?"


def _lead(key: str) -> str:
    return f"The special magic number for {key} is:"
