"""Benchmark commands: every figure reaches the results file and the picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from typer.testing import CliRunner

from siftkv.benchmarks import fidelity_results
from siftkv.benchmarks.results import ResultsFile
from siftkv.cli import bench
from siftkv.errors import SiftKVError


class TestCommands:
    def test_fidelity_writes_results_and_picture(self, folder: Path, words: Path, tmp_path: Path) -> None:
        found = tmp_path / "found.json"
        asked = ["fidelity", "--model", str(folder), "--data", str(words), "--prompt", "90", "--forced", "6"]
        asked += [
            "--kv",
            "uniform:k8v4",
            "--kv",
            "diffkv",
            "--kv",
            "diffkv:alpha_low=0",
            "--json",
            str(found),
            "--plot",
            str(tmp_path / "p.png"),
        ]
        done = CliRunner().invoke(bench.app, asked)
        assert done.exit_code == 0, done.output
        assert "uniform:k8v4" in done.output
        results = ResultsFile.read(found)
        assert results.name == "fidelity"
        said = {row.what for row in results.rows}
        for kv in ("uniform:k8v4", "diffkv", "diffkv:alpha_low=0"):
            for text in ("words", fidelity_results.ALL_TEXTS):
                assert {
                    f"{kv}, {text}: {x}" for x in ("mean KL", "top-1 agreement", "perplexity ratio", "physical bytes")
                } <= said
        assert "uniform:k8v4 mean KL" in said
        assert len(results.data["runs"]) == 3
        assert all(math.isfinite(run["divergence"]["mean_kl"]) for run in results.data["runs"])
        assert (tmp_path / "p.png").stat().st_size > 10_000

    def test_cpu_writes_results_and_picture(self, folder: Path, words: Path, tmp_path: Path) -> None:
        found = tmp_path / "found.json"
        asked = [
            "cpu",
            "--model",
            str(folder),
            "--data",
            str(words),
            "--contexts",
            "40",
            "--batches",
            "1,2",
            "--new-tokens",
            "2",
        ]
        done = CliRunner().invoke(
            bench.app, [*asked, "--repeats", "1", "--json", str(found), "--plot", str(tmp_path / "p.png")]
        )
        assert done.exit_code == 0, done.output
        stored = json.loads(found.read_text())
        assert stored["data"]["threads"] == torch.get_num_threads()
        assert sum(row["bar"] is not None for row in stored["rows"]) == 2 * 2 * 2 + 2
        assert (tmp_path / "p.png").stat().st_size > 10_000

    def test_a_wrong_number_is_named(self) -> None:
        done = CliRunner().invoke(bench.app, ["cpu", "--contexts", "many"])
        assert isinstance(done.exception, SiftKVError)
        assert "many" in str(done.exception)
