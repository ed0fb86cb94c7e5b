"""The fidelity benchmark: what is compared with what, and how it is summed up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from siftkv.benchmarks import fidelity, fidelity_results
from siftkv.benchmarks.fidelity import Measurement, Protocol, Window
from siftkv.benchmarks.texts import read_text
from siftkv.engine.outputs import KVReport
from siftkv.errors import PolicyError, SiftKVError
from siftkv.evaluate.divergence import Divergence
from siftkv.models import Decoder, LoadedModel, load_model
from tests.tiny import prompt, tiny_model

SMALL = Protocol(prompt=90, forced=12, rows=4)


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
