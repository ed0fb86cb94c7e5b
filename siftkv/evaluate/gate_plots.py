"""The gate's pictures: fidelity against bytes, and drift along the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from siftkv.evaluate.gate_results import GateSummary
from siftkv.evaluate.pareto import Point, plot_pareto
from siftkv.evaluate.plots import log_scale, new_figure, save_figure

PICTURES = {"pareto.png": "Mean KL against physical bytes", "drift.png": "Mean KL along the text"}
_MARKERS = "os^Dv<>Pp"


def draw(summaries: Sequence[GateSummary], folder: str | Path, title: str) -> None:
    """Draw PICTURES into a folder. Raises SiftKVError when they cannot be written."""
    points = [Point(s.kv, s.size.ratio, s.metrics["mean_kl"]) for s in summaries]
    plot_pareto(points, Path(folder) / "pareto.png", title, "mean KL(full || sifted), nats per token", True, log=True)
    _plot_drift(summaries, Path(folder) / "drift.png", title)


def _plot_drift(summaries: Sequence[GateSummary], path: Path, title: str) -> None:
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
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    axes.set_xlabel("tokens after the prompt")
    axes.set_ylabel("mean KL(full || sifted), nats per token")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path, title)
