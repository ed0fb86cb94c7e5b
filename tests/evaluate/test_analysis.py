"""The evidence: what is counted over exact attention, and the report made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from siftkv.benchmarks.fidelity import Protocol, Window
from siftkv.errors import SiftKVError
from siftkv.evaluate.analysis import plots, run
from siftkv.evaluate.analysis.attention import BINS, kept_attention, observe, quantile, span
from siftkv.evaluate.report import Report
from siftkv.evaluate.resume import Records
from tests.models_helpers import DenseAttention
from tests.tiny import prompt, tiny_model

LENGTH = 48


def test_observed_figures_are_those_of_the_attention_matrix() -> None:
    model = tiny_model()
    ids = prompt(LENGTH, seed=1)
    found = observe(model.decoder, ids)
    weights: list[torch.Tensor] = []
    dense = DenseAttention(1)
    dense.lengths = [LENGTH]

    def spy(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * q.shape[-1] ** -0.5
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        weights.append(logits.masked_fill(future, -torch.inf).softmax(-1))
        return dense(layer, q, k, v)

    model.decoder(torch.tensor(ids), torch.arange(LENGTH), spy)
    rows = torch.arange(LENGTH // 2, LENGTH)
    for layer, weight in enumerate(weights):
        own = weight.unflatten(0, (2, 2))[:, :, rows]  # [H, G, M, T]
        needed = (own.sort(-1, descending=True).values.cumsum(-1) < 0.95).sum(-1) + 1
        assert found.critical[layer] == pytest.approx((needed / (rows + 1)).mean((1, 2)).numpy(), rel=1e-5)
        half = own[:, :, ::2]
        seen = (torch.arange(LENGTH) <= rows[::2, None]).sum(0).clamp_min(1) * 2
        assert torch.allclose(found.importance[layer], half.sum((1, 2)) / seen, atol=1e-6)
    assert int(found.scores.sum()) == 2 * 4 * int((rows + 1).sum())
    assert int(found.norms.sum()) == 2 * 2 * LENGTH
    assert torch.allclose(found.kept[..., -1], torch.ones(2, 2), atol=1e-5)


def test_spans_are_read_from_histograms() -> None:
    counts = torch.zeros(len(BINS) - 1, dtype=torch.int64)
    counts[8], counts[24] = 50, 50  # 4 apart, at a quarter a bin
    assert span(counts) == pytest.approx(4.0)
    assert quantile(counts, 0.2) == pytest.approx(float(BINS[8]) + 0.125)


def test_dynamic_budgets_keep_as_many_tokens_and_more_attention() -> None:
    found = observe(tiny_model().decoder, prompt(LENGTH, seed=2))
    for budget in (0.1, 0.3):
        static, dynamic = (float(kept_attention(found, budget, d).mean()) for d in (False, True))
        assert 0 < static <= dynamic + 0.02 <= 1.02
    assert kept_attention(found, 1.0, False) == pytest.approx(1.0, abs=1e-5)


def test_analysis_report_and_pictures(tmp_path: Path) -> None:
    model = tiny_model()
    protocol = Protocol(prompt=40, forced=8)
    prompts = {"one": prompt(LENGTH, seed=3), "two": prompt(40, seed=4)}
    window = Window("one", 0, prompt(protocol.length, seed=5))
    kv = "diffkv:window=8,sinks=2,alpha_low=0.5"
    records = Records(tmp_path / "records.jsonl", {})
    found = run.analyse(model, prompts, window, protocol, kv, records, kernels="reference")
    assert set(found.precision) == set(run.PRECISIONS)
    for shares in found.tiers.values():
        assert sum(shares.values()) == pytest.approx(1.0)
        assert set(shares) >= {"window", "dropped"}
    plots.draw(found, tmp_path, "tiny")
    sections = plots.analysis_sections(found)
    Report("analysis", "A", plots.analysis_rows(found), found.to_dict(), sections, plots.PICTURES).write(tmp_path)
    assert set(json.loads((tmp_path / "results.json").read_text())["data"]["critical_share"]) == {"one", "two"}
    for picture in plots.PICTURES:
        assert (tmp_path / picture).stat().st_size > 1000
    with pytest.raises(SiftKVError, match="the prompt short has 3 tokens"):
        run.analyse(model, {"short": [1, 2, 3]}, window, protocol, kv, records)
