"""The lm-evaluation-harness adapter: scores, windows, generation, and a local task through the command line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from siftkv.cli import app
from siftkv.cli.lm_eval import arguments
from tests.models_helpers import FAMILIES, save_random
from tests.tiny import prompt, tiny_model


def test_a_run_without_a_model_type_gets_ours() -> None:
    assert arguments(["--tasks", "x"]) == ["run", "--model", "siftkv", "--tasks", "x"]
    assert arguments(["run", "--tasks", "x"]) == ["run", "--model", "siftkv", "--tasks", "x"]
    for given in (["ls", "tasks"], ["run", "--help"], ["run", "--model", "hf"], ["--model=hf"], []):
        assert arguments(given) == given


class TestAdapter:
    @pytest.fixture(autouse=True)
    def _harness(self) -> None:
        pytest.importorskip("lm_eval")
        from siftkv.integrations.lm_eval import SiftKVLM

        self.make = lambda **settings: SiftKVLM(tiny_model(), kernels="reference", **settings)

    def test_log_likelihoods_are_those_of_a_forward_pass(self) -> None:
        from tests.models_helpers import DenseAttention

        lm = self.make(kv="full", batch_size=2)
        pairs = [
            (prompt(30, seed=1), prompt(5, seed=2)),
            (prompt(4, seed=3), prompt(1, seed=4)),
            ([7], prompt(3, seed=5)),
        ]
        found = lm._loglikelihood_tokens([(None, *pair) for pair in pairs], disable_tqdm=True)
        decoder = tiny_model().decoder
        for (context, target), (score, greedy) in zip(pairs, found, strict=True):
            attention = DenseAttention(1)
            attention.lengths = [len(context) + len(target)]
            ids = torch.tensor(context + target)
            logits = decoder.logits(decoder(ids, torch.arange(len(ids)), attention))[len(context) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None]).sum()
            assert score == pytest.approx(float(wanted), abs=1e-3)
            assert greedy == bool((logits.argmax(-1) == torch.tensor(target)).all())
        assert len(lm.reports) == 3

    def test_policy_settings_may_follow_as_arguments(self) -> None:
        lm = self.make(kv="diffkv:alpha_high=1", alpha_low=0.5, window=8)
        assert (lm.llm.kv.alpha_high, lm.llm.kv.alpha_low, lm.llm.kv.window) == (1.0, 0.5, 8)

    def test_a_long_context_loses_its_start_and_a_long_text_is_cut_into_windows(self) -> None:
        lm = self.make(max_model_len=40, batch_size=4)
        long, target = prompt(100, seed=1), prompt(6, seed=2)
        [cut], [whole] = (lm._loglikelihood_tokens([(None, c, target)], True) for c in (long, long[-34:]))
        assert cut == whole
        text = " ".join(f"t{i}" for i in (x for x in prompt(120, seed=3) if x > 1))
        [score] = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))], disable_tqdm=True)
        assert score < 0
        assert max(r.tokens_seen for r in lm.reports) <= 40

    def test_generation_stops_at_strings_and_limits(self) -> None:
        lm = self.make()
        ask = "t5 t6 t7 t8"
        [text] = lm.generate_until([SimpleNamespace(args=(ask, {"until": [], "max_gen_toks": 6}))], disable_tqdm=True)
        words = text.split()
        assert len(words) == 6
        stop = {"until": [f" {words[2]}"], "max_gen_toks": 6}
        [short] = lm.generate_until([SimpleNamespace(args=(ask, stop))], disable_tqdm=True)
        assert text.startswith(short)
        assert len(short.split()) <= 2


def test_a_local_task_through_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    config = copy.deepcopy(FAMILIES["llama"])
    config.max_position_embeddings = 256
    save_random(config, tmp_path / "model")
    rows = [{"text": f"w{i} w{i + 1}", "choices": ["w9", "w10 w11"], "label": i % 2} for i in range(3, 9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "task.yaml").write_text(
        "task: local_choice\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "output_type: multiple_choice\n"
        "test_split: test\n"
        'doc_to_text: "{{text}}"\n'
        'doc_to_choice: "{{choices}}"\n'
        "doc_to_target: label\n"
        "metric_list: [{metric: acc}]\n"
    )
    model = f"pretrained={tmp_path / 'model'},kv=diffkv:alpha_low=0.1,window=4,kernels=reference"
    command = ["lm-eval", "--model_args", model, "--include_path", str(tmp_path), "--tasks", "local_choice"]
    done = CliRunner().invoke(app, [*command, "--output_path", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    [stored] = (tmp_path / "out").rglob("results_*.json")
    assert 0 <= json.loads(stored.read_text())["results"]["local_choice"]["acc,none"] <= 1
