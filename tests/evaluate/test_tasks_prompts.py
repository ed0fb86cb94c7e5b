"""Tasks: worked examples before a problem, and engines of a given size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from siftkv.errors import SiftKVError
from siftkv.evaluate.resume import Records
from siftkv.evaluate.tasks import run
from siftkv.evaluate.tasks.base import Problem
from siftkv.evaluate.tasks.examples import with_examples
from siftkv.evaluate.tasks.run import Raw, Sampling, gather, judged, open_engine
from tests.tiny import tiny_model

EXAMPLES = [{"question": "1+1?", "answer": "two"}, {"question": "1+2?", "answer": "three"}]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "examples.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in EXAMPLES))
    return str(path)


def test_examples_are_earlier_turns(file: str) -> None:
    asked, other = Problem("gsm8k", "a", "2+2?", "Q: 2+2?"), Problem("mbpp", "b", "add", "add")
    found, untouched = with_examples([asked, other], {"gsm8k": file})
    assert [(t["role"], t["content"]) for t in found.turns()] == [
        ("user", "1+1?"),
        ("assistant", "two"),
        ("user", "1+2?"),
        ("assistant", "three"),
        ("user", "2+2?"),
    ]
    assert found.text() == "1+1?\ntwo\n\n1+2?\nthree\n\nQ: 2+2?"
    assert untouched == other
    assert other.turns() == [{"role": "user", "content": "add"}]


def test_examples_of_a_task_without_problems_are_refused(file: str) -> None:
    with pytest.raises(SiftKVError, match="examples for aime24 but no problems"):
        with_examples([Problem("gsm8k", "a", "m", "p")], {"aime24": file})


def test_examples_are_part_of_what_a_record_stands_for(file: str, tmp_path: Path) -> None:
    model, sampling, records = tiny_model(max_position=2048), Sampling(max_tokens=2), Records(tmp_path / "r.jsonl", {})
    problems = gather({}, ["tool_call"], 1, 0)
    shown = with_examples(problems, {"tool_call": file})
    run.run(model, problems, ["full"], sampling, records, kernels="reference")
    assert run.pending(model, problems, ["full"], sampling, records) == 0
    assert run.pending(model, shown, ["full"], sampling, records) == 1
    [plain], [long] = (run.run(model, p, ["full"], sampling, records, kernels="reference") for p in (problems, shown))
    assert long.cache["tokens_seen"] > plain.cache["tokens_seen"]


def test_a_small_pool_changes_no_answer(tmp_path: Path) -> None:
    model, sampling = tiny_model(max_position=2048), Sampling(max_tokens=4)
    problems = gather({}, ["tool_call"], 3, 0)
    large = open_engine(model, "full", problems, sampling, 3, "reference")
    small = open_engine(model, "full", problems, sampling, 3, "reference", 1 << 20)
    assert small.cache.spec.num_pages < large.cache.spec.num_pages
    found = [
        run.run(model, problems, ["full"], sampling, Records(tmp_path / f"{size}.jsonl", {}), 3, "reference", **more)
        for size, more in (("large", {}), ("small", {"memory_bytes": 1 << 20}))
    ]
    assert [a.text for a in found[0]] == [a.text for a in found[1]]


@pytest.mark.parametrize(("kv", "rows"), [("uniform:k4v4,window=32", 32), ("full", 16), ("tova:0.5", 16)])
def test_windows_have_the_size_of_the_policys(kv: str, rows: int) -> None:
    problems = gather({}, ["tool_call"], 1, 0)
    llm = open_engine(tiny_model(max_position=2048), kv, problems, Sampling(max_tokens=2), 1, "reference")
    assert llm.cache.spec.max_window == rows


def test_an_answer_can_be_judged_later() -> None:
    asked = Problem("strict_json", "p", "m", "p", gold={"object": {"a": 1}})
    record = judged(asked, Raw('{"a": 1}', False, 5, 0.1, {"ratio": 0.5}), chat=True)
    assert (record["correct"], record["valid"], record["tokens"], record["cache"]) == (True, True, 5, {"ratio": 0.5})
