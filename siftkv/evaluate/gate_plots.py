"""The gate's pictures: fidelity against bytes, a line a policy, and drift along the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siftkv.evaluate.gate_results import GateSummary
from siftkv.evaluate.plots import log_scale, new_figure, save_figure
from siftkv.policies import parse_policy

PICTURES = {"pareto.png": "Fidelity against physical bytes", "drift.png": "Mean KL along the text"}
_MARKERS = "os^Dv<>Ph*Xd"
_NAMED_UP_TO = 4
"""Settings of a policy up to which each point has its name beside it."""


def draw(summaries: Sequence[GateSummary], folder: str | Path, title: str) -> None:
    """Draw PICTURES into a folder. Raises SiftKVError when they cannot be written."""
    plot_fidelity(summaries, Path(folder) / "pareto.png", title)
    plot_drift(summaries, Path(folder) / "drift.png", title)


def plot_fidelity(summaries: Sequence[GateSummary], path: str | Path, title: str) -> None:
    """Mean KL (log) and top-1 agreement against physical bytes, with intervals, a line a policy."""
    policies: dict[str, list[GateSummary]] = {}
    for s in sorted(summaries, key=lambda s: s.size.ratio):
        if s.metrics["mean_kl"].value > 0:
            policies.setdefault(parse_policy(s.kv).name, []).append(s)
    figure = new_figure(12, 5)
    kl, top1 = figure.subplots(1, 2)
    for i, (name, own) in enumerate(policies.items()):
        style = {"marker": _MARKERS[i % len(_MARKERS)], "color": f"C{i % 10}", "ms": 4.5, "lw": 1.2, "label": name}
        names = [s.kv for s in own] if len(policies) <= _NAMED_UP_TO and len(own) <= _NAMED_UP_TO else []
        _line(kl, own, "mean_kl", 1, style, names)
        _line(top1, own, "top1_agreement", 100, style, [])
    if policies:
        log_scale(kl)
        figure.legend(*kl.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    kl.set_ylabel("mean KL(full || sifted), nats per token")
    top1.set_ylabel("same likeliest token as full, %")
    for axes in (kl, top1):
        axes.margins(x=0.12)
        axes.set_xlabel("physical KV bytes, % of bf16")
        _plain(axes)
    save_figure(figure, path, title)


def _line(
    axes: Any, own: Sequence[GateSummary], metric: str, scale: float, style: dict[str, Any], names: Sequence[str]
) -> None:
    found = [s.metrics[metric].scaled(scale) for s in own]
    shares = [100 * s.size.ratio for s in own]
    error = [[max(0.0, f.value - f.low) for f in found], [max(0.0, f.high - f.value) for f in found]]
    axes.errorbar(shares, [f.value for f in found], yerr=error, elinewidth=0.7, capsize=1.5, **style)
    for name, share, figure in zip(names, shares, found, strict=False):
        axes.annotate(name, (share, figure.value), xytext=(6, 4), textcoords="offset points", fontsize=7.5)


def plot_drift(summaries: Sequence[GateSummary], path: str | Path, title: str) -> None:
    """Mean KL (log) along the text, with intervals, a line a setting."""
    figure = new_figure(8.5, 4.4)
    axes = figure.subplots()
    shown = [s for s in summaries if any(b.mean_kl.value > 0 for b in s.buckets)]
    for i, s in enumerate(shown):
        middle = [(b.start + b.stop) / 2 for b in s.buckets]
        line = {"marker": _MARKERS[i % len(_MARKERS)], "ms": 4, "lw": 1.3, "color": f"C{i % 10}"}
        axes.plot(middle, [b.mean_kl.value for b in s.buckets], label=s.kv, **line)
        low, high = [b.mean_kl.low for b in s.buckets], [b.mean_kl.high for b in s.buckets]
        axes.fill_between(middle, low, high, color=line["color"], alpha=0.12, lw=0)
    if shown:
        log_scale(axes)
        figure.legend(loc="outside right center", frameon=False, fontsize=8)
    axes.set_xlabel("tokens after the prompt")
    axes.set_ylabel("mean KL(full || sifted), nats per token")
    _plain(axes)
    save_figure(figure, path, title)


def _plain(axes: Any) -> None:
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
