"""Benchmarks: how texts are cut, what is compared with what, and that every figure reaches the results file."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from siftkv.benchmarks import cpu, cpu_results, fidelity, fidelity_results
from siftkv.benchmarks.cpu import TRANSFORMERS, Case
from siftkv.benchmarks.fidelity import Measurement, Protocol, Window
from siftkv.benchmarks.opening import open_for
from siftkv.benchmarks.prompt_memory import PromptMemory, trace_prompt
from siftkv.benchmarks.results import ResultsFile
from siftkv.benchmarks.texts import Text, cut_windows, leading_tokens, read_text
from siftkv.cli import bench
from siftkv.data import TEXTS
from siftkv.engine.outputs import KVReport
from siftkv.errors import PolicyError, SiftKVError
from siftkv.evaluate.divergence import Divergence
from siftkv.models import Decoder, LoadedModel, load_model
from siftkv.policies import parse_policy
from tests.models_helpers import FAMILIES, save_random
from tests.tiny import prompt, tiny_model

SMALL = Protocol(prompt=90, forced=12, rows=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random `transformers` model, saved, whose words are w3 to w60."""
    path = tmp_path_factory.mktemp("tiny")
    config = copy.deepcopy(FAMILIES["llama"])
    config.max_position_embeddings = 256
    save_random(config, path)
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    drawn = torch.randint(3, 61, (600,), generator=torch.Generator().manual_seed(5)).tolist()
    path.write_text(" ".join(f"w{i}" for i in drawn))
    return path


class TestTexts:
    def test_lines_are_joined_with_nothing_between(self, tmp_path: Path) -> None:
        path = tmp_path / "two.jsonl"
        path.write_text('{"text": "one \\n"}\n\n{"text": " two", "id": 1}\n')
        assert read_text(path) == Text("two", "one \n two")

    def test_plain_text_and_shipped_text(self, tmp_path: Path) -> None:
        path = tmp_path / "plain.txt"
        path.write_text("as it is\n", "utf-8")
        assert read_text(path) == Text("plain", "as it is\n")
        assert "Sherlock Holmes" in read_text(TEXTS[0]).text

    @pytest.mark.parametrize(
        "content", ['{"text": "a"}\n{"title": "b"}', '{"text": "a"}\nnot json', '{"text": "a"}\n{"text": 3}']
    )
    def test_a_bad_line_is_named(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(content)
        with pytest.raises(SiftKVError, match="line 2"):
            read_text(path)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SiftKVError, match=r"nowhere\.txt"):
            read_text(tmp_path / "nowhere.txt")

    def test_windows_start_at_fixed_offsets(self) -> None:
        assert cut_windows(list(range(100)), [], "t", 5, 3, 10, 7) == [list(range(s, s + 5)) for s in (7, 17, 27)]
        assert cut_windows(list(range(100)), [-1], "t", 5, 2, 4) == [[-1, 0, 1, 2, 3], [-1, 4, 5, 6, 7]]

    def test_the_last_window_may_end_with_the_text_but_not_after(self) -> None:
        assert cut_windows(list(range(25)), [], "t", 5, 3, 10)[-1] == [20, 21, 22, 23, 24]
        with pytest.raises(SiftKVError, match="t has 24 tokens"):
            cut_windows(list(range(24)), [], "t", 5, 3, 10)

    def test_leading_tokens_are_those_of_the_tokenizer(self) -> None:
        class Stub:
            bos_token_id = 1

            def __init__(self, ids: list[int]) -> None:
                self.ids = ids

            def __call__(self, text: str) -> dict[str, list[int]]:
                return {"input_ids": self.ids}

        assert leading_tokens(Stub([1, 7])) == [1]
        assert leading_tokens(Stub([7])) == []


def _measure(
    model: LoadedModel, windows: list[Window], settings: list[str], protocol: Protocol = SMALL
) -> list[Measurement]:
    return fidelity.measure(model, fidelity.plan(model, windows, settings, protocol), kernels="reference")


class TestFidelity:
    @pytest.fixture(scope="class")
    def windows(self) -> list[Window]:
        return [Window("a", 0, prompt(SMALL.length, 1)), Window("b", 0, prompt(SMALL.length, 2))]

    @pytest.fixture(scope="class")
    def measured(self, windows: list[Window]) -> list[Measurement]:
        settings = ["full", "uniform:k8v4,window=8", "diffkv:alpha_high=0,alpha_low=0,window=8", "diffkv:window=8"]
        return _measure(tiny_model(), windows, settings)

    def test_full_beside_full_is_itself(self, measured: list[Measurement]) -> None:
        for m in measured[:2]:
            assert m.kv == "full"
            assert m.divergence.mean_kl < 1e-6
            assert m.divergence.top1_agreement == 1.0
            assert m.divergence.perplexity_ratio == pytest.approx(1.0, abs=1e-6)

    def test_every_setting_meets_every_window_in_order(self, measured: list[Measurement]) -> None:
        assert [m.text for m in measured] == ["a", "b"] * 4
        assert [m.kv for m in measured[::2]] == list(dict.fromkeys(m.kv for m in measured))

    def test_thresholds_that_never_demote_are_uniform(self, measured: list[Measurement]) -> None:
        for uniform, never in zip(measured[2:4], measured[4:6], strict=True):
            assert uniform.divergence.mean_kl > 1e-6
            assert never.divergence.mean_kl == pytest.approx(uniform.divergence.mean_kl, rel=1e-3)
            assert never.cache.tokens_by_tier["k8v4"] == uniform.cache.tokens_by_tier["k8v4"] > 0
            assert never.cache.tokens_by_tier["k4v2"] == 0

    def test_every_token_that_was_fed_is_accounted_for(self, measured: list[Measurement]) -> None:
        for m in measured:
            assert m.cache.tokens_seen == SMALL.prompt + SMALL.forced
            assert sum(m.cache.tokens_by_tier.values()) == (SMALL.prompt + SMALL.forced) * 2 * 2

    def test_reference_likelihood_is_that_of_the_tokens_that_follow(
        self, measured: list[Measurement], windows: list[Window]
    ) -> None:
        """Against a plain forward pass over the whole window: a shift of one token would show."""
        model = tiny_model()
        ids = torch.tensor(windows[0].ids)
        logits = _dense_logits(model.decoder, ids)[SMALL.prompt : -1]
        target = ids[SMALL.prompt + 1 :]
        nll = torch.nn.functional.cross_entropy(logits.double(), target).item()
        assert measured[0].divergence.reference_nll == pytest.approx(nll, rel=1e-4)

    def test_results_do_not_depend_on_the_batch(self, measured: list[Measurement], windows: list[Window]) -> None:
        [alone] = _measure(tiny_model(), windows[1:], ["diffkv:window=8"], Protocol(90, 12, rows=2))
        assert alone.divergence.mean_kl == pytest.approx(measured[-1].divergence.mean_kl, rel=1e-3)
        assert alone.cache.tokens_by_tier == measured[-1].cache.tokens_by_tier

    def test_batches_hold_at_most_so_many_rows(self, windows: list[Window]) -> None:
        settings = [f"diffkv:alpha_high={i}" for i in range(1, 8)]
        plan = fidelity.plan(tiny_model(), windows, [*settings, "full"], SMALL)
        comparisons = [c for _, batches in plan.pools for batch in batches for c in batch]
        assert all(sum(1 + len(kv) for _, kv in batch) <= SMALL.rows for _, batches in plan.pools for batch in batches)
        for window in windows:
            assert [kv for w, part in comparisons if w is window for kv in part] == [*settings, "full"]
        assert plan.steps == SMALL.forced * sum(len(batches) for _, batches in plan.pools)

    def test_settings_share_a_pool_only_where_they_need_the_same(self, windows: list[Window]) -> None:
        settings = ["diffkv", "diffkv:alpha_low=0.1", "diffkv:window=128", "uniform:k8v4", "uniform:k4v2"]
        plan = fidelity.plan(tiny_model(), windows, settings, SMALL)
        assert [pool for pool, _ in plan.pools] == [settings[:2], *([s] for s in settings[2:])]

    def test_windows_are_cut_from_tokens(self, folder: Path, words: Path) -> None:
        model = load_model(folder)
        protocol = Protocol(prompt=40, forced=10, windows=2, offset=5)
        first, second = fidelity.windows_of(model, [read_text(words)], protocol)
        ids = model.tokenizer(words.read_text(), add_special_tokens=False)["input_ids"]
        assert first.ids == ids[5:56]
        assert second.ids == ids[55:106]

    def test_two_texts_of_one_name_are_refused(self, folder: Path, words: Path) -> None:
        text = read_text(words)
        with pytest.raises(SiftKVError, match="words"):
            fidelity.windows_of(load_model(folder), [text, text], SMALL)

    def test_settings_that_mean_the_same_run_once(self) -> None:
        assert fidelity.distinct(["diffkv", "full", "diffkv:alpha_high=1,alpha_low=0.02"]) == ["diffkv", "full"]
        with pytest.raises(PolicyError, match="nonsense"):
            fidelity.distinct(["nonsense"])

    def test_the_grid_is_valid_and_has_no_repetition(self) -> None:
        assert fidelity.distinct(fidelity.grid()) == fidelity.grid()
        assert len(fidelity.grid()) > 20

    @pytest.mark.parametrize("wrong", [{"prompt": 0}, {"forced": 0}, {"windows": 0}, {"offset": -1}, {"rows": 1}])
    def test_a_protocol_that_measures_nothing_is_refused(self, wrong: dict[str, int]) -> None:
        with pytest.raises(SiftKVError, match=next(iter(wrong))):
            Protocol(**wrong)


def _dense_logits(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    from siftkv.attention import causal_attention

    return decoder.logits(decoder(ids, torch.arange(len(ids)), lambda layer, q, k, v: causal_attention(q, k, v)[0]))


def _made_up(kv: str, text: str, kl: float, top1: float, ratio: float, perplexity: float = 1.0) -> Measurement:
    divergence = Divergence(10, kl, kl, kl, top1, perplexity, 1.0, 1.0, [kl] * 10)
    report = KVReport(kv, 100, int(1000 * ratio), int(2000 * ratio), 1000, {"k8v4": 60, "dropped": 40}, 3)
    return Measurement(kv, text, 0, divergence, report)


class TestFidelityResults:
    def test_means_over_texts(self) -> None:
        found = fidelity_results.summarise(
            [_made_up("full", "a", 0.1, 0.9, 0.2, 2.0), _made_up("full", "b", 0.3, 0.7, 0.4, 0.5)]
        )
        assert [s.text for s in found] == ["a", "b", fidelity_results.ALL_TEXTS]
        mean = found[-1]
        assert mean.mean_kl == pytest.approx(0.2)
        assert mean.top1 == pytest.approx(80)
        assert mean.ratio == pytest.approx(0.3)
        assert mean.perplexity_ratio == pytest.approx(1.0)
        assert mean.tiers == {"k8v4": pytest.approx(0.6), "dropped": pytest.approx(0.4)}

    def test_bars_hold_the_best_setting_that_is_small_enough(self) -> None:
        found = fidelity_results.summarise(
            [
                _made_up("uniform:k8v4", "a", 0.002, 0.99, 0.45),
                _made_up("diffkv:alpha_high=1", "a", 0.001, 0.99, 0.31),
                _made_up("diffkv:alpha_high=2", "a", 0.02, 0.95, 0.29),
                _made_up("diffkv:alpha_high=3", "a", 0.04, 0.93, 0.2),
            ]
        )
        bars = {row.what: row for row in fidelity_results.rows(found)}
        best = "best diffkv at <= 30% physical: "
        assert bars[best + "setting"].value == "diffkv:alpha_high=2"
        assert [bars[best + x].value for x in ("mean KL", "top-1 agreement", "physical bytes")] == [0.02, 95.0, 0.29]
        assert all(row.ok for row in bars.values() if row.bar is not None)
        assert bars["uniform:k8v4 mean KL"].bar == "<= 0.003"

    def test_bars_fail_where_nothing_is_small_enough(self) -> None:
        found = fidelity_results.summarise([_made_up("diffkv", "a", 0.001, 0.99, 0.31)])
        held = [row for row in fidelity_results.rows(found) if row.bar is not None]
        assert len(held) == 3
        assert not any(row.ok for row in held)


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
