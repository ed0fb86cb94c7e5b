"""The gate: records that continue, figures over all positions, intervals, drift, report and pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from siftkv.benchmarks.fidelity import Protocol, Window, windows_of
from siftkv.benchmarks.texts import Text
from siftkv.errors import NumericsError, RequestError, SiftKVError
from siftkv.evaluate import gate, gate_bars, gate_plots, gate_results
from siftkv.evaluate.bootstrap import drawn_positions, mean_interval, upper_bound
from siftkv.evaluate.divergence import DivergenceMeter
from siftkv.evaluate.gate import WindowResult
from siftkv.evaluate.gate_meter import GroupMeter
from siftkv.evaluate.pareto import Interval, Point, frontier
from siftkv.evaluate.report import Report, markdown_table
from siftkv.evaluate.resume import Records, fingerprint
from siftkv.models import LoadedModel
from tests.tiny import VOCAB, tiny_model

SMALL = Protocol(prompt=60, forced=16, windows=2, rows=4)
SETTINGS = ["full", "uniform:k8v4", "uniform:k4v2"]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def windows(model: LoadedModel) -> list[Window]:
    drawn = torch.randint(1, VOCAB, (400,), generator=torch.Generator().manual_seed(5)).tolist()
    return windows_of(model, [Text("words", " ".join(f"t{i}" for i in drawn))], SMALL)


def run(model: LoadedModel, windows: list[Window], records: Records, settings: list[str]) -> list[WindowResult]:
    return gate.run(model, windows, settings, SMALL, records, kernels="reference")


def test_an_interrupted_run_measures_only_what_is_missing(
    model: LoadedModel, windows: list[Window], tmp_path: Path
) -> None:
    identity = {"model": fingerprint(model)}
    file = tmp_path / "records.jsonl"
    run(model, windows[:1], Records(file, identity), SETTINGS[:2])
    with file.open("a") as cut:
        cut.write('{"key": "half a li')
    again = Records(file, identity)
    left = gate.pending(model, windows, SETTINGS, SMALL, again)
    missing = {(w.index, kv) for _, batches in left for b in batches for w, own in b for kv in own}
    assert missing == {(1, "full"), (1, "uniform:k8v4"), (0, "uniform:k4v2"), (1, "uniform:k4v2")}
    results = run(model, windows, again, SETTINGS)
    assert [(r.kv, r.window) for r in results] == [(kv, i) for kv in SETTINGS for i in (0, 1)]
    whole = run(model, windows, Records(tmp_path / "other.jsonl", identity), SETTINGS)
    for one, other in zip(results, whole, strict=True):
        assert one.kl == pytest.approx(other.kl, rel=1e-3, abs=1e-6)
        assert one.cache["physical_bytes"] == other.cache["physical_bytes"]
    assert not gate.pending(model, windows, SETTINGS, SMALL, Records(file, identity))
    assert gate.pending(model, windows, SETTINGS, SMALL, Records(file, {"model": "another"}))


def test_figures_report_and_pictures(model: LoadedModel, windows: list[Window], tmp_path: Path) -> None:
    results = run(model, windows, Records(tmp_path / "records.jsonl", {}), SETTINGS)
    summaries, gaps = gate_results.summarise(results, buckets=4, resamples=100)
    full, fine, coarse = summaries
    assert full.metrics["mean_kl"].value < 1e-6
    assert fine.metrics["mean_kl"].value < coarse.metrics["mean_kl"].value
    held = [r.cache["physical_bytes"] for r in results if r.kv == coarse.kv]
    assert coarse.size.physical == np.mean(held) < coarse.size.physical * 1.01 <= coarse.size.peak * 1.01
    assert [(b.start, b.stop) for b in coarse.buckets] == [(0, 4), (4, 8), (8, 12), (12, 16)]
    assert np.mean([b.mean_kl.value for b in coarse.buckets]) == pytest.approx(coarse.metrics["mean_kl"].value)
    gap = next(g for g in gaps if (g.kv, g.other) == ("uniform:k8v4", "uniform:k4v2"))
    assert gap.mean_kl.high < 0
    gate_plots.draw(summaries, tmp_path, "tiny")
    sections = gate_results.gate_sections(summaries, gaps)
    data = gate_results.gate_data(summaries, gaps, {"model": "tiny"})
    Report("gate", "Gate", gate_results.gate_rows(summaries), data, sections, gate_plots.PICTURES).write(tmp_path)
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [s["kv"] for s in stored["data"]["summaries"]] == SETTINGS
    text = (tmp_path / "report.md").read_text()
    for picture in gate_plots.PICTURES:
        assert f"({picture})" in text
        assert (tmp_path / picture).stat().st_size > 1000


def made(kl: list[float], kv: str = "a", window: int = 0) -> WindowResult:
    n = len(kl)
    cache = dict.fromkeys(("physical_bytes", "peak_bytes", "bf16_bytes", "ratio", "bytes_per_live_token"), 1.0)
    return WindowResult(kv, "text", window, np.asarray(kl), np.ones(n), np.full(n, 2.0), np.full(n, 1.5), cache)


def test_statistics_are_taken_over_all_positions_of_all_windows() -> None:
    results = [made([0.0] * 90 + [1.0] * 10), made([2.0] * 10 + [0.0] * 90, window=1)]
    [summary], gaps = gate_results.summarise(results, buckets=2, resamples=50)
    assert not gaps
    assert summary.metrics["mean_kl"].value == pytest.approx(0.15)
    assert summary.metrics["worst_decile_kl"].value == pytest.approx(1.5)
    assert summary.metrics["perplexity_ratio"].value == pytest.approx(math.exp(0.5))
    assert summary.drift == pytest.approx(0.5)


def test_draws_take_whole_windows_and_neighbouring_positions() -> None:
    for index in drawn_positions(3, 100, resamples=20):
        assert len(index) == 3 * 100
        blocks = index.reshape(3, 4, 25)
        assert len({int(x) // 100 for x in blocks[0].reshape(-1)}) == 1
        assert (np.diff(blocks % 100, axis=-1) % 100 == 1).all()


def test_intervals_cover_the_mean_and_narrow_with_more_problems() -> None:
    values = np.random.default_rng(1).normal(1.0, 1.0, 400)
    few, many = mean_interval(values[:25]), mean_interval(values)
    assert many.low < 1.0 < many.high
    assert many.high - many.low < few.high - few.low
    assert many.value < upper_bound(values) < many.high


def test_equal_outcomes_still_leave_doubt() -> None:
    none, three = np.zeros(100), np.ones(3)
    assert upper_bound(none) == pytest.approx(0.0295, abs=1e-3)
    assert mean_interval(none).low == 0.0
    assert mean_interval(none).high == pytest.approx(0.0362, abs=1e-3)
    assert mean_interval(three).low == pytest.approx(0.292, abs=1e-3)
    assert mean_interval(none, (-1.0, 1.0)).low < 0


def test_frontier_keeps_what_nothing_beats_on_both() -> None:
    points = [
        Point(n, x, Interval(y, y, y)) for n, x, y in [("a", 0.2, 3), ("b", 0.3, 4), ("c", 0.4, 1), ("d", 0.4, 2)]
    ]
    assert [p.name for p in frontier(points, lower_is_better=True)] == ["a", "c"]
    assert [p.name for p in frontier(points, lower_is_better=False)] == ["a", "b"]


def test_a_fingerprint_tells_models_apart_and_survives_value_conditioning(model: LoadedModel) -> None:
    assert fingerprint(tiny_model()) == fingerprint(model)
    assert fingerprint(tiny_model(seed=1)) != fingerprint(model)


def test_a_damaged_records_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("[]\n")
    with pytest.raises(SiftKVError, match=r"line 1 of .*records.jsonl"):
        Records(file, {})


def test_cells_cannot_break_a_table() -> None:
    assert markdown_table(["a", "b"], [["x|y\nz", "1"]]) == "| a | b |\n| :-- | --: |\n| x\\|y z | 1 |"


def test_no_drift_is_told_from_rounding_errors() -> None:
    [summary], _ = gate_results.summarise([made([1e-9] * 50 + [0.1] * 50)], buckets=2, resamples=20)
    assert summary.drift is None


def test_groups_side_by_side_give_the_figures_of_each_alone() -> None:
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 7, 50, generator=drawn)  # [positions, rows, vocab]
    logits[:, 0, 4] = -math.inf  # a banned token adds nothing
    targets = torch.randint(5, 50, (6, 2), generator=drawn).tolist()
    side_by_side, alone = GroupMeter([4, 3]), [DivergenceMeter(), DivergenceMeter()]
    for rows, tokens in zip(logits, targets, strict=True):
        side_by_side.update(rows, tokens)
        for meter, part, token in zip(alone, torch.split(rows, [4, 3]), tokens, strict=True):
            meter.update(part[0], part[1:], token)
    for group, meter in zip(side_by_side.positions(), alone, strict=True):
        for one, other in zip(group, meter.positions(), strict=True):
            for name in ("kl", "agree", "nll", "reference_nll"):
                torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-12, atol=1e-12)


def test_a_group_meter_refuses_what_does_not_fit() -> None:
    meter = GroupMeter([2, 2])
    for logits, tokens in ((torch.zeros(3, 9), [1, 1]), (torch.zeros(4, 9), [1]), (torch.zeros(4, 9), [1, 9])):
        with pytest.raises(RequestError):
            meter.update(logits, tokens)
    with pytest.raises(RequestError, match="nothing was compared"):
        meter.positions()
    meter.update(torch.zeros(4, 9), [1, 2])
    meter.update(torch.full((4, 9), math.nan), [1, 2])
    with pytest.raises(NumericsError, match="position 1"):
        meter.positions()
    with pytest.raises(RequestError, match="candidate"):
        GroupMeter([2, 1])


def summary(kv: str, ratio: float, kl: float, top1: float = 0.95) -> gate_results.GateSummary:
    value = {"mean_kl": kl, "top1_agreement": top1}
    metrics = {name: Interval(value.get(name, 1.0), 0.0, 1.0) for name in gate_results.METRICS}
    return gate_results.GateSummary(kv, 8, metrics, [], {}, gate_results.Size(1.0, 1.0, ratio, ratio, 1.0))


def test_bars_hold_the_best_setting_that_is_small_enough() -> None:
    diffkv = [
        summary("diffkv:alpha_high=6", 0.2, 0.08),
        summary("diffkv", 0.3, 0.02),
        summary("diffkv:sinks=1", 0.25, 0.09),
    ]
    sifted = [
        summary("sift:0.26", 0.251, 0.001),
        summary("sift:0.25", 0.25, 0.018, 0.97),
        summary("sift:0.2", 0.2, 0.05),
    ]
    uniform = [summary("uniform:k4v4", 0.33, 0.003), summary("uniform:k8v4", 0.45, 0.9)]
    rows = gate_bars.bar_rows("smollm2-135m-instruct", [*sifted, *uniform, *diffkv])
    assert [row.ok for row in rows] == [True, False, True, True]
    assert rows[0].what == "uniform:k4v4: mean KL"
    assert "sift:0.25, 25.0%" in rows[1].what
    assert rows[3].value == pytest.approx(0.018 / 0.04)  # halfway between 0.08 and 0.02 in logarithms
    assert gate_bars.kl_at(0.19, diffkv) is None
    assert gate_bars.kl_at(0.31, diffkv) is None
    assert not gate_bars.bar_rows("another", sifted)
