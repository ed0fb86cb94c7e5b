"""Tasks: how public sets are read, how answers are judged, code is run, and runs are resumed and summarised."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from siftkv.errors import SiftKVError
from siftkv.evaluate.code_sandbox import Limits, network_guard, run_code
from siftkv.evaluate.report import Report
from siftkv.evaluate.resume import Records
from siftkv.evaluate.tasks import plots, results, run
from siftkv.evaluate.tasks.base import Problem, after_thinking, code_blocks
from siftkv.evaluate.tasks.run import TASKS, Answer, Sampling, gather
from siftkv.models import LoadedModel
from tests.tiny import tiny_model

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\n\ndef area(r: float) -> float:\n    """Area of a circle."""\n',
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(2) - 12.566) < 0.01\n",
}
MBPP = {
    "text": "Write a function to add.",
    "task_id": 11,
    "test_list": ["assert add(1, 2) == 3"],
    "test_setup_code": "",
}


def lines(path: Path, *rows: object) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def problem(task: str, **gold: object) -> Problem:
    return Problem(task, "p", "m", "plain", (), gold)


class TestReading:
    def test_public_formats(self, tmp_path: Path) -> None:
        gsm = lines(tmp_path / "g.jsonl", {"question": "2+2?", "answer": "2+2=4\n#### 1,004"})
        aime = lines(tmp_path / "a.jsonl", {"problem": "x?", "answer": 204, "id": 60})
        umath = lines(tmp_path / "u.jsonl", {"problem_statement": "x?", "golden_answer": "\\frac12", "uuid": "u-1"})
        whole = tmp_path / "mbpp.json"
        whole.write_text(json.dumps([MBPP, MBPP | {"task_id": 12}]))
        packed = tmp_path / "h.jsonl.gz"
        packed.write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))
        files = {"gsm8k": gsm, "aime24": aime, "umath": umath, "mbpp": str(whole), "humaneval": str(packed)}
        found = gather(files, ["tool_call"], 1, 0)
        assert [(p.task, p.name) for p in found] == [
            ("tool_call", "tool_call-0"),
            ("gsm8k", "gsm8k-0"),
            ("aime24", "60"),
            ("umath", "u-1"),
            ("mbpp", "11"),
            ("humaneval", "HumanEval/0"),
        ]
        golds = {p.task: p.gold.get("answer") for p in found}
        assert (golds["gsm8k"], golds["aime24"], golds["umath"]) == ("1004", "204", "\\frac12")

    def test_a_damaged_archive_is_named(self, tmp_path: Path) -> None:
        file = tmp_path / "h.jsonl.gz"
        whole = gzip.compress(json.dumps(HUMANEVAL).encode() * 50)
        for content in (b"plain", whole[:-20], whole[:20] + b"xxxxxxxx" + whole[28:]):
            file.write_bytes(content)
            with pytest.raises(SiftKVError, match="not a whole gzip file"):
                gather({"humaneval": str(file)}, [], 1, 0)

    @pytest.mark.parametrize(
        ("files", "made", "says"),
        [
            ({"gsm9k": "x"}, [], "no task 'gsm9k'"),
            ({}, ["gsm8k"], "--data gsm8k=FILE"),
            ({"tool_call": "x"}, [], "--task tool_call"),
            ({"gsm8k": "missing.jsonl"}, [], "cannot read missing.jsonl"),
        ],
    )
    def test_wrong_requests_say_what_to_do(self, files: dict[str, str], made: list[str], says: str) -> None:
        with pytest.raises(SiftKVError, match=says):
            gather(files, made, None, 0)

    def test_a_wrong_row_is_named(self, tmp_path: Path) -> None:
        good = {"question": "q", "answer": "1"}
        with pytest.raises(SiftKVError, match=r"row 2 of .*: answer: field required"):
            gather({"math500": lines(tmp_path / "x.jsonl", good, {"question": "q"})}, [], None, 0)


class TestMaths:
    @pytest.mark.parametrize(
        ("gold", "text", "truncated", "verdict"),
        [
            ("18", "She makes \\boxed{18} dollars.", False, (True, True)),
            ("18", "First 5, so she makes 18.", False, (True, True)),
            ("18", "It is \\boxed{17}.", False, (False, True)),
            ("18", "First 18 and then", True, (False, False)),
            ("18", "no idea", False, (False, False)),
            ("18", "<think>it is \\boxed{3}</think>\\boxed{18}", False, (True, True)),
            ("\\frac{1}{2}", "\\boxed{0.5}", False, (True, True)),
            ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\pi/2)}", False, (True, True)),
        ],
    )
    def test_judgement(self, gold: str, text: str, truncated: bool, verdict: tuple[bool, bool]) -> None:
        judged = TASKS["math500"].judge(problem("math500", answer=gold), text, truncated, True)
        assert (judged.correct, judged.valid) == verdict


class TestSandbox:
    def test_verdicts(self) -> None:
        assert run_code("assert 1 + 1 == 2").verdict == "passed"
        failed = run_code("assert 1 + 1 == 3, 'sums'")
        assert failed.verdict == "failed"
        assert "sums" in failed.message
        assert run_code("import sys\nsys.exit(0)").verdict == "failed"
        assert run_code("import os\nos._exit(0)").verdict == "failed"

    def test_limits(self) -> None:
        assert run_code("while True: pass", Limits(seconds=1)).verdict == "timeout"
        assert run_code("import time\ntime.sleep(30)", Limits(seconds=1)).verdict == "timeout"
        assert "MemoryError" in run_code("x = bytearray(1 << 32)", Limits(memory_bytes=1 << 30)).message
        assert run_code("open('big', 'wb').write(bytes(1 << 25))").verdict == "failed"

    def test_it_starts_in_an_empty_folder_without_the_callers_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET", "1")
        program = "import os\nassert os.listdir() == ['program.py']\nassert 'SECRET' not in os.environ"
        assert run_code(program).verdict == "passed"

    @pytest.mark.skipif(sys.platform != "linux" or not network_guard(), reason="no network namespaces here")
    def test_it_has_no_network(self) -> None:
        program = "import socket\ns = socket.socket()\ntry: s.connect(('127.0.0.1', 9))\nexcept OSError as e: raise"
        assert "unreachable" in run_code(program).message


class TestCode:
    def judge(
        self, row: dict[str, object], task: str, text: str, tmp_path: Path, chat: bool = True
    ) -> tuple[bool, bool]:
        [asked] = gather({task: lines(tmp_path / "x.jsonl", row)}, [], None, 0)
        judged = TASKS[task].judge(asked, text, False, chat)
        return judged.correct, judged.valid

    @pytest.mark.parametrize(
        ("text", "verdict"),
        [
            ("Sure:\n```python\ndef area(r: float) -> float:\n    return math.pi * r * r\n```\nDone.", (True, True)),
            ("```python\ndef area(r):\n    return 3 * r * r\n```", (False, True)),
            ("    return math.pi * r * r\n", (True, True)),
            ("```python\ndef area(r:\n```", (False, False)),
        ],
    )
    def test_humaneval(self, text: str, verdict: tuple[bool, bool], tmp_path: Path) -> None:
        assert self.judge(HUMANEVAL, "humaneval", text, tmp_path) == verdict

    def test_a_plain_model_continues_the_prompt(self, tmp_path: Path) -> None:
        assert self.judge(HUMANEVAL, "humaneval", "    return math.pi * r * r\n", tmp_path, chat=False) == (True, True)

    def test_mbpp(self, tmp_path: Path) -> None:
        assert self.judge(MBPP, "mbpp", "```python\ndef add(a, b):\n    return a + b\n```", tmp_path) == (True, True)
        assert self.judge(MBPP, "mbpp", "I cannot.", tmp_path) == (False, False)

    def test_blocks_and_thoughts(self) -> None:
        assert code_blocks("a\n```python\nx = 1\n```\nb\n```\ny = 2\n") == ["x = 1\n", "y = 2\n"]
        assert after_thinking("<think>a</think>b") == "b"


class TestProbes:
    def test_the_right_object_in_any_wrapping_and_nothing_else(self) -> None:
        for task in ("strict_json", "tool_call"):
            for asked in gather({}, [task], 8, 3):
                right = json.dumps(asked.gold["object"])
                judge = TASKS[task].judge
                for text in (right, f"```json\n{right}\n```", f"<tool_call>\n{right}\n</tool_call>"):
                    judged = judge(asked, text, False, True)
                    assert (judged.correct, judged.valid) == (True, True)
                assert judge(asked, f"Here it is: {right}", False, True).valid is False
                wrong = json.dumps(asked.gold["object"] | {"more": 1})
                assert (judge(asked, wrong, False, True).correct, judge(asked, wrong, False, True).valid) == (
                    False,
                    True,
                )
                assert judge(asked, right[:-1], True, True).valid is False

    def test_types_count(self) -> None:
        asked = problem("strict_json", object={"age": 30, "weight": 2.0, "ok": True})
        judge = TASKS["strict_json"].judge
        assert judge(asked, '{"age": 30, "weight": 2, "ok": true}', False, True).correct
        assert not judge(asked, '{"age": "30", "weight": 2, "ok": true}', False, True).correct
        assert not judge(asked, '{"age": 30, "weight": 2, "ok": 1}', False, True).correct


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model(max_position=2048)


def test_run_resumes_and_continues_to_the_same_answers(model: LoadedModel, tmp_path: Path) -> None:
    problems, settings = gather({}, ["strict_json", "tool_call"], 2, 0), ["full", "uniform:k4v2"]
    sampling = Sampling(max_tokens=6, temperature=0.7, repeats=2)
    records = Records(tmp_path / "records.jsonl", {})
    run.run(model, problems[:1], settings[:1], sampling, records, kernels="reference")
    assert run.pending(model, problems, settings, sampling, records) == 2 * 4 * 2 - 2
    answers = run.run(model, problems, settings, sampling, records, batch=3, kernels="reference")
    other = Records(tmp_path / "other.jsonl", {})
    again = run.run(model, problems, settings[:1], sampling, other, batch=8, kernels="reference")
    assert [a.text for a in again] == [a.text for a in answers if a.kv == "full"]
    assert len({a.text for a in again}) > 1
    assert run.pending(model, problems, settings, sampling, Records(tmp_path / "records.jsonl", {})) == 0
    assert run.pending(model, problems, settings, Sampling(max_tokens=7), records) == 4 * 2
    scores, flipped = results.summarise(answers), results.flips(answers)
    assert [(s.kv, s.task) for s in scores[:3]] == [("full", t) for t in (results.ALL, "strict_json", "tool_call")]
    assert scores[0].answers == 8
    pictures = plots.draw(scores, tmp_path, "tiny")
    sections = results.task_sections(scores, flipped)
    data = results.task_data(scores, flipped, answers, {})
    Report("tasks", "T", results.task_rows(scores), data, sections, pictures).write(tmp_path)
    assert set(pictures) == {"pareto.png", "pareto-strict_json.png", "pareto-tool_call.png"}
    assert "uniform:k4v2" in (tmp_path / "report.md").read_text()


def answer(kv: str, problem: int, correct: bool, tokens: int = 10, repeat: int = 0, valid: bool = True) -> Answer:
    cache = {"ratio": 0.3, "peak_bytes": 4.0, "bf16_bytes": 10.0, "bytes_per_live_token": 100.0}
    return Answer(kv, "gsm8k", f"p{problem}", repeat, correct, valid, not valid, tokens, 30.0, str(correct), "", cache)


def test_differences_are_paired_and_flips_are_listed() -> None:
    answers = [answer("full", i, i < 3) for i in range(4)]
    answers += [
        answer("x", 0, True, 12),
        answer("x", 1, False, 12, valid=False),
        answer("x", 2, True),
        answer("x", 3, True),
    ]
    full, other = results.summarise(answers)
    assert full.accuracy.value == other.accuracy.value == 0.75
    assert other.against_full is not None
    assert other.against_full.loss.value == 0.0
    assert other.against_full.loss.low < 0 < other.against_full.bound
    assert other.against_full.length_ratio == pytest.approx(1.1)
    assert (other.truncated, other.invalid) == (0.25, 0.25)
    assert other.solved_per_minute == pytest.approx(60 * 3 / 120)
    assert [(f.problem, f.lost) for f in results.flips(answers)] == [("p1", True), ("p3", False)]


def test_repeats_count_as_one_problem() -> None:
    answers = [answer("full", 0, r == 0, repeat=r) for r in range(4)] + [answer("full", 1, True)]
    [score] = results.summarise(answers)
    assert (score.problems, score.answers) == (2, 5)
    assert score.accuracy.value == pytest.approx((0.25 + 1) / 2)


def test_greedy_repeats_are_refused() -> None:
    with pytest.raises(SiftKVError, match="raise the temperature"):
        Sampling(repeats=2)
