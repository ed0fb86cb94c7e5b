"""The commands: help, errors before anything slow, and what they leave in their folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from siftkv.cli import app
from siftkv.kernels import reference
from tests.models_helpers import FAMILIES, save_random

KV = ("--kv", "diffkv:window=4,sinks=1")


def siftkv(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="siftkv")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = copy.deepcopy(FAMILIES["llama"])
    config.max_position_embeddings = 1024
    save_random(config, folder)
    return str(folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    drawn = torch.randint(3, 61, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    path.write_text(" ".join(f"w{i}" for i in drawn))
    return str(path)


@pytest.fixture
def _reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to compile: what is tested here is the command line."""
    monkeypatch.setattr("siftkv.engine.llm.get_kernels", lambda *_: reference)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["eval", "gate", "--kv", "nonsense"], "unknown kv policy 'nonsense'"),
        (["eval", "gate", "--prompt", "0"], "prompt=0: use 1 or more"),
        (["eval", "gate", "--data", "missing.txt"], "cannot read missing.txt"),
        (["eval", "tasks", "--data", "gsm8k"], "write TASK=FILE"),
        (["eval", "tasks", "--data", "gsm8k=a", "--data", "gsm8k=b"], "names gsm8k twice"),
        (["eval", "tasks", "--task", "json"], "there is no task 'json'"),
        (["eval", "retrieval", "--lengths", "1k"], "'1k' is not a list of whole numbers"),
        (["eval", "retrieval", "--task", "needle"], "no retrieval task 'needle'"),
        (["analyze", "--kv", "nonsense"], "unknown kv policy 'nonsense'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_before_a_model_is_loaded(arguments: list[str], says: str) -> None:
    result = siftkv(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.usefixtures("_reference_kernels")
class TestRuns:
    def gate(self, saved: str, words: str, out: Path, *more: str) -> Result:
        sizes = ("--prompt", "40", "--forced", "8", "--windows", "2", "--resamples", "50", "--buckets", "2")
        return siftkv("eval", "gate", "--model", saved, "--data", words, *sizes, *KV, "--out", str(out), *more)

    def test_gate_continues_from_its_folder(self, saved: str, words: str, tmp_path: Path) -> None:
        first = self.gate(saved, words, tmp_path)
        assert first.exit_code == 0, first.stderr
        assert "diffkv:window=4,sinks=1" in first.stdout
        stored = json.loads((tmp_path / "results.json").read_text())["data"]
        assert [s["kv"] for s in stored["summaries"]] == ["full", KV[1]]
        records = (tmp_path / "records.jsonl").read_text().splitlines()
        assert len(records) == 4
        second = self.gate(saved, words, tmp_path, "--kv", "uniform:k8v4")
        assert second.exit_code == 0, second.stderr
        assert (tmp_path / "records.jsonl").read_text().splitlines()[:4] == records
        assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 6
        assert {p.name for p in tmp_path.glob("*.png")} == {"pareto.png", "drift.png"}

    def test_tasks(self, saved: str, tmp_path: Path) -> None:
        limits = ("--limit", "1", "--max-tokens", "4")
        result = siftkv("eval", "tasks", "--model", saved, *limits, *KV, "--out", str(tmp_path))
        assert result.exit_code == 0, result.stderr
        stored = json.loads((tmp_path / "results.json").read_text())["data"]
        assert {a["task"] for a in stored["answers"]} == {"strict_json", "tool_call"}
        assert (tmp_path / "pareto.png").exists()

    def test_retrieval(self, saved: str, tmp_path: Path) -> None:
        grid = ("--task", "multi_needle", "--lengths", "300", "--samples", "1", "--question", "hidden")
        result = siftkv("eval", "retrieval", "--model", saved, *grid, *KV, "--out", str(tmp_path))
        assert result.exit_code == 0, result.stderr
        assert "question hidden" in result.stdout
        assert (tmp_path / "length-hidden.png").exists()

    def test_analyze(self, saved: str, words: str, tmp_path: Path) -> None:
        sizes = ("--prompt", "60", "--forced", "4")
        result = siftkv("analyze", "--model", saved, "--data", words, *sizes, *KV, "--out", str(tmp_path))
        assert result.exit_code == 0, result.stderr
        assert "Keys against values" in result.stdout
        assert (tmp_path / "sparsity.png").exists()
