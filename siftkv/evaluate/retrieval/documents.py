"""Questions over many documents: invented ones in two steps, or those of a data set."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from siftkv.errors import SiftKVError
from siftkv.evaluate.retrieval.items import Haystack, Item, invented_name

_FILLER = 3
"""Sentences of text that follow the fact of an invented document."""


class Document(BaseModel):
    """gold: whether the answer rests on it."""

    model_config = ConfigDict(extra="ignore")

    title: str
    text: str
    gold: bool = False


class Question(BaseModel):
    """One line of a file of questions over documents (HotpotQA's distractor setting, flattened)."""

    model_config = ConfigDict(extra="ignore")

    question: str
    answer: str
    docs: list[Document]


@dataclass(frozen=True)
class _Place:
    keeper: str
    town: str
    river: str


def multi_document(hay: Haystack, rng: random.Random, length: int, depth: float, sample: int) -> Item:
    """Two documents of many hold the answer: who keeps a town's lighthouse, and on which river the town lies.

    The second one lies at `depth`, the first at random.
    """
    names: dict[str, None] = {}
    seed, start = rng.random(), hay.start(rng)

    def name(count: int) -> str:
        while len(names) < count + 1:
            names[invented_name(rng)] = None
        return list(names)[count]

    def place(i: int) -> _Place:
        first, last, town, river = (name(4 * i + k) for k in range(4))
        return _Place(f"{first} {last}", f"{town}holt", river)

    def build(count: int) -> str:
        keepers = [f"{p.keeper} keeps the lighthouse of {p.town}." for p in map(place, range(count))]
        rivers = [f"The town of {p.town} lies on the river {p.river}." for p in map(place, range(1, count))]
        facts = keepers + rivers
        random.Random(seed).shuffle(facts)
        gold = place(0)
        facts.insert(round(depth * len(facts)), f"The town of {gold.town} lies on the river {gold.river}.")
        texts = [" ".join([fact, *hay.take(_FILLER, start + _FILLER * i)]) for i, fact in enumerate(facts)]
        return _numbered(texts)

    context = hay.fit(build, length)
    gold = place(0)
    question = f"According to the documents above, on which river lies the town whose lighthouse {gold.keeper} keeps?"
    lead = "The town lies on the river"
    return Item("multi_document", length, depth, sample, context, question, lead, (gold.river,), 24)


def read_questions(path: str | Path) -> list[Question]:
    """Questions of a .jsonl file with `question`, `answer` and `docs` of `title`, `text`, `gold`.

    Raises SiftKVError that names the line that is not one.
    """
    try:
        lines = Path(path).read_text("utf-8").split("\n")  # JSON may hold other ends of line, such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise SiftKVError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(Question.model_validate(json.loads(line)))
            except (ValueError, ValidationError) as error:
                raise SiftKVError(
                    f"line {number} of {path} is not a question with question, answer and docs (title, text, gold)"
                ) from error
    if not found:
        raise SiftKVError(f"{path} holds no questions")
    return found


def question_item(
    hay: Haystack, questions: Sequence[Question], rng: random.Random, length: int, depth: float, sample: int
) -> Item:
    """The `sample`-th question, its own documents among those of others as far as the length allows; the gold ones lie
    together at `depth`.
    """
    index = sample % len(questions)
    own = questions[index]
    gold = [d for d in own.docs if d.gold] or own.docs[:1]
    others = [d for q in (*questions[index + 1 :], *questions[:index]) for d in q.docs]
    rng.shuffle(others)
    distractors = [d for d in own.docs if d not in gold] + [d for d in others if d not in own.docs]

    def build(count: int) -> str:
        chosen = distractors[: count - 1]
        at = round(depth * len(chosen))
        return _numbered([f"{d.title}\n{d.text}" for d in (*chosen[:at], *gold, *chosen[at:])])

    context = hay.fit(build, length, most=1 + len(distractors))
    question = f"Answer with a few words, from the documents above. {own.question}"
    return Item("multi_document_file", length, depth, sample, context, question, "", (own.answer,), 32, any_of=True)


def _numbered(texts: Sequence[str]) -> str:
    return "\n\n".join(f"Document {i}: {text}" for i, text in enumerate(texts, 1))
