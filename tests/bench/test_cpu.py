"""The CPU benchmark: speeds against transformers, and the memory of a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from siftkv.benchmarks import cpu, cpu_results
from siftkv.benchmarks.cpu import TRANSFORMERS, Case
from siftkv.benchmarks.opening import open_for
from siftkv.benchmarks.prompt_memory import PromptMemory, trace_prompt
from siftkv.benchmarks.texts import read_text
from siftkv.errors import SiftKVError
from siftkv.models import load_model
from siftkv.policies import parse_policy
from tests.tiny import prompt, tiny_model


class TestCpu:
    @pytest.fixture(scope="class")
    def speeds(self, folder: Path, words: Path) -> list[cpu.Speed]:
        model = load_model(folder)
        reference = cpu.load_reference(str(folder), model.decoder.dtype)
        cases = [Case(40, 1, 3), Case(40, 2, 3)]
        return cpu.compare(
            model, reference, ["full", "diffkv:window=8"], cases, read_text(words), repeats=2, kernels="reference"
        )

    def test_every_engine_runs_every_case(self, speeds: list[cpu.Speed]) -> None:
        assert [(s.engine, s.case.batch) for s in speeds] == [
            (engine, batch) for batch in (1, 2) for engine in (TRANSFORMERS, "full", "diffkv:window=8")
        ]

    def test_all_decode_the_same_number_of_steps(self, speeds: list[cpu.Speed]) -> None:
        assert all(len(run.steps_s) == 3 and run.prefill_s > 0 for s in speeds for run in s.runs)
        assert all(len(s.runs) == 2 for s in speeds)

    def test_transformers_holds_every_token_once(self, speeds: list[cpu.Speed]) -> None:
        tokens, layers, heads, dim = 40 + 3, 2, 2, 8
        assert [s.kv_bytes for s in speeds if s.engine == TRANSFORMERS] == [
            b * tokens * layers * heads * dim * 2 * 4 for b in (1, 2)
        ]

    def test_medians_and_shares(self) -> None:
        case = Case(100, 2, 4)
        slow = cpu.Speed(
            TRANSFORMERS, case, [cpu.Run(p, [d] * 4, 1, 1) for p, d in ((2.0, 0.5), (1.0, 0.25), (9.0, 9.0))]
        )
        fast = cpu.Speed("full", case, [cpu.Run(1.0, [0.25] * 4, 1, 1)])
        assert slow.prefill_tokens_s == 100
        assert slow.decode_tokens_s == 4
        assert slow.step_s == 0.5
        assert cpu_results.against_transformers([slow, fast], fast) == (2.0, 2.0)

    def test_rows_have_the_bars(self, speeds: list[cpu.Speed]) -> None:
        memory = {"full": PromptMemory(40, 1, 10, 20, 30)}
        bars = {row.what: row.bar for row in cpu_results.rows(speeds, memory) if row.bar is not None}
        assert bars == {
            "full, context 40, batch 1: decode": ">= 0.95",
            "full, context 40, batch 1: prefill": ">= 0.8",
            "full, context 40, batch 2: decode": ">= 0.95",
            "full, context 40, batch 2: prefill": ">= 0.8",
            "diffkv:window=8, context 40, batch 1: decode": ">= 0.8",
            "diffkv:window=8, context 40, batch 1: prefill": ">= 0.8",
            "diffkv:window=8, context 40, batch 2: decode": ">= 0.8",
            "diffkv:window=8, context 40, batch 2: prefill": ">= 0.8",
            "full, prompt of 40: layers held at full precision": "<= 1",
        }

    def test_prompts_are_distinct_even_where_they_overlap(self, folder: Path, words: Path) -> None:
        model, text = load_model(folder), read_text(words)
        prompts = cpu.prompts_for(model, text, Case(500, 8, 1))
        assert all(len(p) == 500 for p in prompts)
        assert len({tuple(p) for p in prompts}) == 8
        with pytest.raises(SiftKVError, match="words has 600 tokens"):
            cpu.prompts_for(model, text, Case(601, 1, 1))

    @pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
    def test_an_empty_case_is_refused(self, wrong: tuple[int, int, int]) -> None:
        with pytest.raises(SiftKVError):
            Case(*wrong)


class TestPromptMemory:
    @pytest.mark.parametrize("kv", ["full", "uniform:k4v2", "diffkv"])
    def test_one_layer_at_a_time_is_held_at_full_precision(self, kv: str) -> None:
        model = tiny_model(num_layers=4)
        llm = open_for(model, parse_policy(kv), 121, 1, kernels="reference")
        traced = trace_prompt(llm, prompt(120), llm.kv)
        assert traced.peak_layers == 1
        assert traced.layer_bytes == 120 * 2 * 16 * 2 * 4
        assert traced.peak_bytes == traced.sifted_bytes + traced.layer_bytes
        assert llm.cache.usage().pages_used == 0

    def test_a_decoder_that_keeps_its_keys_is_caught(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept: list[torch.Tensor] = []
        from siftkv.attention import PrefillAttention

        attend = PrefillAttention.__call__

        def keep(self: PrefillAttention, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kept.append(k)
            return attend(self, layer, q, k, v)

        monkeypatch.setattr(PrefillAttention, "__call__", keep)
        llm = open_for(tiny_model(num_layers=4), parse_policy("diffkv"), 121, 1, kernels="reference")
        assert trace_prompt(llm, prompt(120), llm.kv).peak_layers == 4
