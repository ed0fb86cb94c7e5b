"""Retrieval: what items hold, how they are asked, scored, resumed and reported."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from siftkv.data import read_text
from siftkv.errors import SiftKVError
from siftkv.evaluate.report import Report
from siftkv.evaluate.resume import Records
from siftkv.evaluate.retrieval import plots, results, run
from siftkv.evaluate.retrieval.items import Haystack, Item, tokens_of
from siftkv.evaluate.retrieval.run import FILE_TASK, TASKS, WITH_DEPTH, Grid, Outcome, make_items
from siftkv.models import LoadedModel
from tests.tiny import tiny_model, tiny_tokenizer

TEMPLATE = "{% for m in messages %}t2 {{ m['content'] }} t3{% endfor %} t4"


@pytest.fixture(scope="module")
def hay() -> Haystack:
    return Haystack(read_text(), tiny_tokenizer())


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(max_position=1024)


def questions(path: Path) -> Path:
    rows = [
        {
            "question": f"Who is {i}?",
            "answer": f"answer {i}",
            "docs": [{"title": f"T{i}{j}", "text": f"document {i} {j}", "gold": j == 0} for j in range(4)],
        }
        for i in range(3)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_items_hold_their_answers_fit_their_length_and_repeat(hay: Haystack) -> None:
    grid = Grid(lengths=(600, 900), depths=3, samples=1)
    items = make_items(hay, grid)
    assert [i.name for i in items] == [i.name for i in make_items(hay, grid)]
    assert items == make_items(hay, grid)
    assert {i.task for i in items} == set(TASKS)
    for item in items:
        for answer in item.answers:
            assert answer in item.context
        words = len(item.context.split())
        assert 0.5 * (item.length - 160) < words <= item.length, item.name
    assert items != make_items(hay, Grid(lengths=(600, 900), depths=3, samples=1, seed=1))


@pytest.mark.parametrize("task", WITH_DEPTH)
def test_the_answer_lies_at_its_depth(hay: Haystack, task: str) -> None:
    for depth in (0.0, 0.5, 1.0):
        item = WITH_DEPTH[task](hay, random.Random(3), 3000, depth, 0)
        assert item.context.index(item.answers[0]) / len(item.context) == pytest.approx(depth, abs=0.12)


def test_most_common_words_are_the_answers(hay: Haystack) -> None:
    for item in make_items(hay, Grid(tasks=("common_words", "frequent_words"), lengths=(800,), samples=1)):
        counts: dict[str, int] = {}
        for word in item.context.partition("\n\n")[2].split():
            if not word.rstrip(".").isdigit():
                counts[word] = counts.get(word, 0) + 1
        ranked = sorted(counts, key=lambda w: -counts[w])
        assert set(ranked[: len(item.answers)]) == set(item.answers)
        assert counts[ranked[len(item.answers) - 1]] > counts[ranked[len(item.answers)]]


def test_gold_documents_of_a_file_are_among_others(hay: Haystack, tmp_path: Path) -> None:
    grid = Grid(tasks=("single_needle",), lengths=(600,), depths=3, samples=1)
    items = [i for i in make_items(hay, grid, questions(tmp_path / "qa.jsonl")) if i.task == FILE_TASK]
    assert [i.answers for i in items] == [("answer 0",), ("answer 1",), ("answer 2",)]
    for n, item in enumerate(items):
        assert item.context.count("Document ") == 12  # one gold, three of its own, eight of the others
        at = item.context.index(f"document {n} 0") / len(item.context)
        assert at == pytest.approx(item.depth, abs=0.12)


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    row = {"question": "q\u2028?", "answer": "a", "docs": [{"title": "t\x85", "text": "x"}]}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\n\n")
    [found] = run.documents.read_questions(file)
    assert found.question == row["question"]


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    file.write_text('{"question": "x"}\n')
    with pytest.raises(SiftKVError, match="line 1 of"):
        run.documents.read_questions(file)
    with pytest.raises(SiftKVError, match="no retrieval task 'needle'"):
        Grid(tasks=("needle",))


def item(answers: tuple[str, ...] = ("12", "34"), any_of: bool = False) -> Item:
    return Item("multi_needle", 100, None, 0, "c", "q", "lead", answers, 8, any_of)


def test_scores_count_whole_words() -> None:
    assert item().score("12 and 34.") == 1.0
    assert item().score("12, 345") == 0.5
    assert item(("Baker Street", "x"), any_of=True).score("in baker street") == 1.0
    assert item(("no",), any_of=True).score("I do not know") == 0.0


def test_a_template_is_split_where_the_question_starts() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    asked = Item("x", 100, None, 0, "t5 t6 t7", "t8 t9", " t7", ("a",), 8)
    context, question = tokens_of(asked, tokenizer)
    assert (context, question) == ([2, 5, 6, 7], [8, 9, 3, 4, 7])


def test_run_resumes_and_a_full_cache_does_not_care_when_it_is_asked(
    model: LoadedModel, hay: Haystack, tmp_path: Path
) -> None:
    grid = Grid(tasks=("single_needle", "frequent_words"), lengths=(300,), depths=2, samples=1)
    items, settings = make_items(hay, grid), ["full", "uniform:k4v2"]
    records = Records(tmp_path / "records.jsonl", {})
    run.run(model, items[:2], settings[:1], [False], records, rows=2, kernels="reference")
    assert run.pending(items, settings, [False, True], records) == 2 * 2 * 3 - 2
    outcomes = run.run(model, items, settings, [False, True], records, rows=2, kernels="reference")
    again = Records(tmp_path / "records.jsonl", {})
    assert run.pending(items, settings, [False, True], again) == 0
    outputs = {(o.kv, o.visible, o.item.name): o.output for o in outcomes}
    for i in items:
        assert outputs["full", False, i.name] == outputs["full", True, i.name]
    scores = results.summarise(outcomes)
    pictures = plots.draw(scores, tmp_path, "tiny")
    assert set(pictures) == {f"{kind}-{asked}.png" for kind in ("depth", "length") for asked in ("hidden", "visible")}
    sections = results.retrieval_sections(scores, outcomes)
    Report("retrieval", "R", results.retrieval_rows(scores), {}, sections, pictures).write(tmp_path)
    assert "uniform:k4v2" in (tmp_path / "report.md").read_text()


def test_tasks_weigh_the_same_and_losses_are_paired() -> None:
    def outcome(kv: str, task: str, sample: int, score: float) -> Outcome:
        own = Item(task, 100, None, sample, "c", "q", "", ("a",), 8)
        return Outcome(kv, own, False, score, "out", {"ratio": 0.3, "peak_bytes": 4.0, "bf16_bytes": 10.0})

    made = [outcome(kv, "a", i, 1.0) for kv in ("full", "x") for i in range(3)]
    made += [outcome("full", "b", 0, 1.0), outcome("x", "b", 0, 0.0)]
    scores = {(s.kv, s.task): s for s in results.summarise(made)}
    assert scores["x", results.ALL].score == 0.5
    assert scores["x", results.ALL].loss is not None
    assert scores["x", results.ALL].loss.value == pytest.approx(0.5)
    assert scores["full", results.ALL].loss.value == 0.0
    assert scores["x", "a"].peak_ratio == pytest.approx(0.4)
    assert (
        "| x | question hidden | b/100/-/0 |"
        in results.retrieval_sections(list(scores.values()), made)["Items that changed"]
    )
