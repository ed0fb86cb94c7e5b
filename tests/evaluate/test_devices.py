"""Evaluations with the built-in model, and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from siftkv import LLM, SamplingParams
from siftkv.benchmarks.fidelity import Protocol, windows_of
from siftkv.benchmarks.texts import Text, read_text
from siftkv.data import TEXTS
from siftkv.evaluate import gate
from siftkv.evaluate.analysis.attention import observe
from siftkv.evaluate.gate_results import summarise
from siftkv.evaluate.generation import Request, complete
from siftkv.evaluate.resume import Records
from siftkv.evaluate.retrieval import run as retrieval
from siftkv.evaluate.retrieval.items import Haystack
from siftkv.evaluate.stepping import Script, SteppedRow, step_rows
from siftkv.models import LoadedModel, ModelConfig, load_model, pull, random_model
from siftkv.policies import Full
from tests.tiny import prompt, tiny_tokenizer

CONFIG = ModelConfig("LlamaForCausalLM", 97, 256, 512, 4, 8, 2, 64, 2048, eos_token_ids=(0,))


@pytest.fixture(scope="module")
def builtin() -> LoadedModel:
    pull("smollm2-135m", progress=False)
    return load_model("smollm2-135m")


@pytest.mark.model
def test_the_gate_sees_little_loss_in_a_fine_format(builtin: LoadedModel, tmp_path: Path) -> None:
    protocol = Protocol(prompt=160, forced=24)
    windows = windows_of(builtin, [read_text(TEXTS[1])], protocol)
    found = gate.run(builtin, windows, ["full", "uniform:k8v4"], protocol, Records(tmp_path / "r.jsonl", {}))
    [full, fine], _ = summarise(found, buckets=2, resamples=50)
    assert full.metrics["mean_kl"].value < 1e-6
    assert 0 < fine.metrics["mean_kl"].value < 0.01
    assert fine.metrics["top1_agreement"].value > 0.85


@pytest.mark.model
def test_a_full_cache_finds_a_needle_whenever_it_is_asked(builtin: LoadedModel, tmp_path: Path) -> None:
    hay = Haystack(read_text(TEXTS[0]).text, builtin.tokenizer)
    items = retrieval.make_items(hay, retrieval.Grid(("single_needle",), (400,), depths=1, samples=1))
    found = retrieval.run(builtin, items, ["full"], [False, True], Records(tmp_path / "r.jsonl", {}))
    assert [o.score for o in found] == [1.0, 1.0]


def on_gpu() -> LoadedModel:
    decoder = random_model(CONFIG, 0, torch.float32, "cpu").to(torch.bfloat16).to("cuda")
    return LoadedModel(CONFIG, decoder, tiny_tokenizer(), "tiny")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGPU:
    def test_gate(self, tmp_path: Path) -> None:
        model, protocol = on_gpu(), Protocol(prompt=300, forced=40, windows=2)
        text = Text("words", " ".join(f"t{i}" for i in prompt(800) if i > 1))
        windows = windows_of(model, [text], protocol)
        found = gate.run(model, windows, ["full", "uniform:k4v2"], protocol, Records(tmp_path / "r.jsonl", {}))
        [full, coarse], _ = summarise(found, buckets=2, resamples=50)
        assert full.metrics["mean_kl"].value < 1e-4 < coarse.metrics["mean_kl"].value

    def test_requests_stepped_and_completed(self) -> None:
        llm = LLM(on_gpu(), "full", max_num_seqs=4, max_model_len=512)
        prompts = [prompt(n, seed=n) for n in (40, 90, 7)]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        wanted = [o.token_ids for o in llm.generate(prompts, params)]
        requests = [Request(str(i), ids, params) for i, ids in enumerate(prompts)]
        found = {key: output.token_ids for key, output, _ in complete(llm.engine, Full(), requests)}
        assert [found[str(i)] for i in range(3)] == wanted
        script = Script([[], [5, 6], []], [12, 3, 12], ())
        reports = step_rows(llm.engine, [SteppedRow(ids, Full()) for ids in prompts], script)
        assert [len(tokens) for tokens in script.generated] == [12, 3, 12]
        assert [r.tokens_seen for r in reports] == [51, 94, 18]
        assert llm.cache.free_pages == llm.cache.spec.num_pages

    def test_attention_is_observed_as_on_the_cpu(self) -> None:
        model = on_gpu()
        ids = prompt(200, seed=3)
        found = observe(model.decoder, ids)
        other = observe(random_model(CONFIG, 0, torch.float32, "cpu"), ids)
        assert found.critical.numpy() == pytest.approx(other.critical.numpy(), abs=0.02)
