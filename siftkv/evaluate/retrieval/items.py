"""What a retrieval item is, how it is fitted to a length, turned into tokens, and scored."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from siftkv.benchmarks.texts import leading_tokens
from siftkv.errors import SiftKVError

_OVERHEAD = 160
"""Tokens of an item's length that are kept for the chat template, the question and the start of the answer."""
_UNLIMITED = 2**31


@dataclass(frozen=True)
class Item:
    """One question about a context.

    length: tokens that the whole prompt was fitted to. depth: where the answer lies, 0 = start to 1 = end; None where
    it lies everywhere. lead: the answer's first words, given. answers: strings that the answer must contain, all of
    them, or any where `any_of` is set. max_tokens: to generate.
    """

    task: str
    length: int
    depth: float | None
    sample: int
    context: str
    question: str
    lead: str
    answers: tuple[str, ...]
    max_tokens: int
    any_of: bool = False

    @property
    def name(self) -> str:
        """Tells items of a run apart."""
        depth = "-" if self.depth is None else f"{self.depth:.2f}"
        return f"{self.task}/{self.length}/{depth}/{self.sample}"

    def score(self, output: str) -> float:
        """Share of the answers that the output contains as whole words, upper and lower case alike; 1 or 0 if any."""
        found = [re.search(rf"(?<!\w){re.escape(a.lower())}(?!\w)", output.lower()) is not None for a in self.answers]
        return float(any(found)) if self.any_of else sum(found) / len(found)


class Haystack:
    """Sentences of a text, in order and round again, and the token count of whatever is made of them."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
        self.words = sorted(set(re.findall(r"\b[a-z]{5,10}\b", text)))
        self._tokenizer = tokenizer
        if len(self.sentences) < 20 or len(self.words) < 100:
            raise SiftKVError("the text is too short to hide something in: give one of at least some pages")

    def take(self, count: int, start: int) -> list[str]:
        """`count` sentences from sentence `start` on."""
        return [self.sentences[(start + i) % len(self.sentences)] for i in range(count)]

    def start(self, rng: random.Random) -> int:
        """Where to start."""
        return rng.randrange(len(self.sentences))

    def fit(self, build: Callable[[int], str], length: int, least: int = 1, most: int = _UNLIMITED) -> str:
        """`build(n)` for the largest n up to `most` whose text leaves room for the question in `length` tokens.

        Raises SiftKVError when even `least` is too long.
        """
        budget = length - _OVERHEAD
        if self._count(build(least)) > budget:
            raise SiftKVError(f"a context of {length} tokens is too short for this task: use longer --lengths")
        low, high = least, min(2 * least, most + 1)
        while high <= most and self._count(build(high)) <= budget:
            low, high = high, min(2 * high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._count(build(middle)) <= budget else (low, middle)
        return build(low)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def tokens_of(item: Item, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids of the context and of what follows it: the question, the template's turn, and the answer's lead.

    Both are tokenised for themselves, so that a run in which the question is hidden while the context is sifted feeds
    exactly the tokens of one in which it is not.
    """
    if not getattr(tokenizer, "chat_template", None):
        head = leading_tokens(tokenizer) + _ids(tokenizer, item.context)
        return head, _ids(tokenizer, f"\n\nQuestion: {item.question}\nAnswer: {item.lead}")
    messages = [{"role": "user", "content": f"{item.context}\n\n{item.question}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    split = text.rindex(item.question)
    return _ids(tokenizer, text[:split].rstrip()), _ids(tokenizer, f"\n\n{text[split:]}{item.lead}")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def invented_name(rng: random.Random) -> str:
    """A name of two to four syllables that no text holds but by chance."""
    syllables = (
        "bar",
        "cal",
        "dor",
        "fen",
        "gil",
        "har",
        "kel",
        "lom",
        "mer",
        "nor",
        "pel",
        "quin",
        "ros",
        "tav",
        "vel",
    )
    return "".join(rng.choice(syllables) for _ in range(rng.choice((2, 3, 4)))).capitalize()
