"""Retrieval runs: contexts are sifted before or after the question is known, then answered greedily."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siftkv.benchmarks.opening import open_for
from siftkv.engine.llm import LLM
from siftkv.errors import SiftKVError
from siftkv.evaluate.report import cache_fields
from siftkv.evaluate.resume import Records
from siftkv.evaluate.retrieval import documents, needles, words
from siftkv.evaluate.retrieval.items import Haystack, Item, tokens_of
from siftkv.evaluate.stepping import Script, SteppedRow, step_rows
from siftkv.models import LoadedModel
from siftkv.policies import parse_policy

WITH_DEPTH = {
    "single_needle": needles.single_needle,
    "multi_key": needles.multi_key,
    "multi_document": documents.multi_document,
}
WITHOUT_DEPTH = {
    "multi_needle": needles.multi_needle,
    "variable_tracking": needles.variable_tracking,
    "common_words": words.common_words,
    "frequent_words": words.frequent_words,
}
TASKS = (*WITH_DEPTH, *WITHOUT_DEPTH)
FILE_TASK = "multi_document_file"


@dataclass(frozen=True)
class Grid:
    """What is generated. lengths: tokens. depths: how many places from start to end. samples: items a cell.

    Raises SiftKVError for an unknown task or a value out of range.
    """

    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    depths: int = 5
    samples: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for task in self.tasks:
            if task not in TASKS:
                raise SiftKVError(f"there is no retrieval task {task!r}: choose {', '.join(TASKS)}")
        if self.depths < 1 or self.samples < 1:
            raise SiftKVError("depths and samples must be 1 or more")

    @property
    def places(self) -> list[float]:
        """Depths, 0 to 1; the middle where there is one."""
        return [0.5] if self.depths == 1 else [i / (self.depths - 1) for i in range(self.depths)]


@dataclass(frozen=True)
class Outcome:
    """One item under one setting. visible: whether the question was there when the context was sifted. score: 0 to 1.

    cache: the fields of a `KVReport` at the end of the answer, counts by head left out.
    """

    kv: str
    item: Item
    visible: bool
    score: float
    output: str
    cache: dict[str, Any]


def make_items(hay: Haystack, grid: Grid, questions: str | Path | None = None) -> list[Item]:
    """Every item of a grid, and of a file of questions over documents; the same for equal arguments.

    Raises SiftKVError for a length that is too short or a file that cannot be read.
    """
    found: list[Item] = []
    asked = documents.read_questions(questions) if questions is not None else []
    for length in grid.lengths:
        for sample in range(grid.samples):
            for task in grid.tasks:
                rng = random.Random(f"{grid.seed}/{task}/{length}/{sample}")
                if task in WITHOUT_DEPTH:
                    found.append(WITHOUT_DEPTH[task](hay, rng, length, sample))
                else:
                    found += [WITH_DEPTH[task](hay, rng, length, depth, sample) for depth in grid.places]
            for place, depth in enumerate(grid.places if asked else []):
                rng = random.Random(f"{grid.seed}/{FILE_TASK}/{length}/{sample}")
                index = sample * len(grid.places) + place
                found.append(documents.question_item(hay, asked, rng, length, depth, index))
    return found


def run(
    model: LoadedModel,
    items: Sequence[Item],
    settings: Sequence[str],
    visible: Sequence[bool],
    records: Records,
    rows: int = 4,
    kernels: str = "auto",
    progress: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Answer what `records` lacks, writing each batch as it ends; outcomes of all, by setting, visibility, then item.

    visible: False = the context is sifted before the question is fed through the decode path, True = both are prefilled
    together. rows: requests in a batch. progress: called after each item. Raises PolicyError, FormatError, RequestError
    or OutOfPages for what does not fit the model or the machine.
    """
    longest = max((item.length + item.max_tokens for item in items), default=0)
    for kv in settings:
        left = [(item, seen) for seen in visible for item in items if records.get(kv, _key(item, seen)) is None]
        if left:
            llm = open_for(model, parse_policy(kv), longest, rows, (), kernels)
            for batch in (left[i : i + rows] for i in range(0, len(left), rows)):
                for (item, seen), fields in zip(batch, _answer(llm, batch), strict=True):
                    records.add(kv, _key(item, seen), fields)
                    progress()
    return list(_outcomes(items, settings, visible, records))


def pending(items: Sequence[Item], settings: Sequence[str], visible: Sequence[bool], records: Records) -> int:
    """How many answers `records` lacks."""
    return sum(records.get(kv, _key(i, seen)) is None for kv in settings for seen in visible for i in items)


def _key(item: Item, visible: bool) -> str:
    text = zlib.crc32(f"{item.context}|{item.question}|{item.lead}".encode())
    return f"{item.name}/{'visible' if visible else 'hidden'}/{text:08x}"


def _answer(llm: LLM, batch: Sequence[tuple[Item, bool]]) -> Iterator[dict[str, Any]]:
    rows: list[SteppedRow] = []
    scripts: list[list[int]] = []
    for item, visible in batch:
        context, question = tokens_of(item, llm.tokenizer)
        rows.append(SteppedRow(context + question if visible else context, llm.kv))
        scripts.append([] if visible else question)
    script = Script(scripts, [item.max_tokens for item, _ in batch], llm.engine.eos_token_ids)
    reports = step_rows(llm.engine, rows, script)
    for (item, _), generated, report in zip(batch, script.generated, reports, strict=True):
        output = llm.tokenizer.decode(generated, skip_special_tokens=True)
        yield {"score": item.score(output), "output": output, "cache": cache_fields(report.to_dict())}


def _outcomes(
    items: Sequence[Item], settings: Sequence[str], visible: Sequence[bool], records: Records
) -> Iterator[Outcome]:
    for kv in settings:
        for seen in visible:
            for item in items:
                record = records.get(kv, _key(item, seen))
                if record is not None:
                    yield Outcome(kv, item, seen, record["score"], record["output"], record["cache"])
