"""Pictures and Markdown of an analysis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from siftkv.benchmarks.results import Row
from siftkv.engine.outputs import DROPPED
from siftkv.evaluate.analysis.attention import BINS, span
from siftkv.evaluate.analysis.run import Analysis
from siftkv.evaluate.plots import DROPPED_COLOUR, TIER_COLOURS, WINDOW_COLOUR, new_figure, save_figure
from siftkv.evaluate.report import markdown_table

PICTURES = {
    "span.png": "Attention weights span more orders of magnitude than value norms",
    "critical.png": "Tokens that hold 95 % of the attention: by layer and head, and by prompt",
    "sparsity.png": "The same budget for every head, against one budget for all",
    "precision.png": "Precision of keys against precision of values",
    "tiers.png": "Where tokens live, by prompt",
}
_STATIC, _DYNAMIC = "#888888", "#2a78d6"


def draw(analysis: Analysis, folder: str | Path, title: str) -> None:
    """Draw PICTURES into a folder. Raises SiftKVError when they cannot be written."""
    for name, paint in zip(PICTURES, (_span, _critical, _sparsity, _precision, _tiers), strict=True):
        save_figure(paint(analysis), Path(folder) / name, f"{title}\n{PICTURES[name]}")


def _span(analysis: Analysis) -> Any:
    figure = new_figure(7.5, 4)
    axes = figure.subplots()
    middle = ((BINS[1:] + BINS[:-1]) / 2).numpy()
    for name, colour in (("scores", _DYNAMIC), ("norms", "#e07b39")):
        counts = torch.stack([getattr(o, name) for o in analysis.observed.values()]).sum(0)
        share = counts.double() / counts.sum()
        what = "attention weights" if name == "scores" else "value norms"
        axes.fill_between(middle, 100 * share.numpy(), step="mid", alpha=0.5, color=colour)
        axes.plot([], [], color=colour, lw=6, alpha=0.5, label=f"{what}: {span(counts):.1f} orders of magnitude")
    axes.set_xlabel("log10; the span is from the 1st to the 99th percentile")
    axes.set_ylabel("share, %")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _critical(analysis: Analysis) -> Any:
    figure = new_figure(12, 4.2)
    left, right = figure.subplots(1, 2)
    stacked = torch.stack([o.critical for o in analysis.observed.values()])  # [prompts, L, H]
    image = left.imshow(100 * stacked.mean(0).T.numpy(), aspect="auto", cmap="viridis", vmin=0)
    left.set_xlabel("layer")
    left.set_ylabel("kv head")
    left.set_yticks(range(stacked.shape[2]))
    figure.colorbar(image, ax=left, label="critical tokens, % of context")
    for name, own in zip(analysis.observed, stacked, strict=True):
        right.plot(100 * own.mean(1).numpy(), marker=".", lw=1.2, label=name)
    right.set_xlabel("layer")
    right.set_ylabel("critical tokens, % of context, mean of heads")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=7)
    return figure


def _sparsity(analysis: Analysis) -> Any:
    figure = new_figure(7.5, 4)
    axes = figure.subplots()
    rows = analysis.sparsity()
    budgets = [100 * r.budget for r in rows]
    for kind, colour in (("static", _STATIC), ("dynamic", _DYNAMIC)):
        for part, style in (("mean", "-"), ("worst", ":")):
            values = [100 * getattr(r, f"{kind}_{part}") for r in rows]
            what = "mean of heads" if part == "mean" else "worst tenth of heads"
            axes.plot(budgets, values, style, marker="o", ms=4, color=colour, label=f"{kind}, {what}")
    axes.set_xlabel("tokens kept, % of all heads' tokens")
    axes.set_ylabel("attention kept, %")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _precision(analysis: Analysis) -> Any:
    figure = new_figure(6.5, 3.2)
    axes = figure.subplots()
    names, values = list(analysis.precision), list(analysis.precision.values())
    axes.barh(names, values, color=_DYNAMIC)
    axes.invert_yaxis()
    axes.bar_label(axes.containers[0], [f"{v:.5f}" for v in values], padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel("mean KL(full || quantised), nats per token")
    return figure


def _tiers(analysis: Analysis) -> Any:
    figure = new_figure(8, 1.4 + 0.4 * len(analysis.tiers))
    axes = figure.subplots()
    names = list(analysis.tiers)
    tiers = list(next(iter(analysis.tiers.values())))
    colours = dict(zip((t for t in tiers if t not in ("window", DROPPED)), TIER_COLOURS, strict=False))
    colours |= {"window": WINDOW_COLOUR, DROPPED: DROPPED_COLOUR}
    start = np.zeros(len(names))
    for tier in tiers:
        share = np.asarray([100 * analysis.tiers[name][tier] for name in names])
        axes.barh(names, share, left=start, color=colours.get(tier, _STATIC), label=tier)
        start += share
    axes.invert_yaxis()
    axes.set_xlabel(f"share of entries under {analysis.kv}, %")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def analysis_rows(analysis: Analysis) -> list[Row]:
    """Figures for a results file."""
    found = []
    for name, o in analysis.observed.items():
        found += [
            Row(what=f"{name}: span of attention weights", value=span(o.scores), unit="orders of magnitude"),
            Row(what=f"{name}: span of value norms", value=span(o.norms), unit="orders of magnitude"),
            Row(what=f"{name}: critical tokens", value=float(100 * o.critical.mean()), unit="% of context"),
        ]
    return found + [Row(what=f"{kv}: mean KL", value=kl, unit="nats/token") for kv, kl in analysis.precision.items()]


def analysis_sections(analysis: Analysis) -> dict[str, str]:
    """The Markdown of a report."""
    prompts = [
        [
            name,
            f"{span(o.scores):.1f}",
            f"{span(o.norms):.1f}",
            f"{100 * o.critical.mean():.1f}",
            f"{100 * o.critical.min():.1f} to {100 * o.critical.max():.1f}",
            ", ".join(f"{tier} {share:.0%}" for tier, share in analysis.tiers[name].items() if share),
        ]
        for name, o in analysis.observed.items()
    ]
    header = ["prompt", "scores, orders", "norms, orders", "critical, %", "least to most by head", analysis.kv]
    kept = [
        [
            f"{s.budget:.0%}",
            *(f"{100 * x:.1f}" for x in (s.static_mean, s.dynamic_mean, s.static_worst, s.dynamic_worst)),
        ]
        for s in analysis.sparsity()
    ]
    columns = ["tokens kept", "static, %", "dynamic, %", "static, worst tenth", "dynamic, worst tenth"]
    precision = [[kv, f"{kl:.5f}"] for kv, kl in analysis.precision.items()]
    return {
        "Prompts": markdown_table(header, prompts),
        "Attention kept by static and dynamic sparsity": markdown_table(columns, kept),
        "Keys against values": markdown_table(["format", "mean KL, nats/token"], precision),
    }
