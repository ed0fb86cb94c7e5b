"""Pictures of results. matplotlib's object interface only, so that no display or global state is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from siftkv.benchmarks.cpu import TRANSFORMERS, Speed
from siftkv.benchmarks.cpu_results import DECODE_BARS, PREFILL_BAR, against_transformers
from siftkv.benchmarks.fidelity_results import ALL_TEXTS, DIFFKV_KL, DIFFKV_RATIO, DIFFKV_TOP1, Summary
from siftkv.evaluate.plots import new_figure, save_figure
from siftkv.policies import DiffKV, Full, parse_policy

_BAR = {"color": "#888888", "linewidth": 0.9, "linestyle": (0, (4, 3)), "zorder": 1}
_POINT = "#222222"
SERIES = ("#2a78d6", "#e07b39", "#3f9b6c", "#8a5cc2")


def plot_fidelity(summaries: Sequence[Summary], path: str | Path, title: str) -> None:
    """Mean KL (log) and top-1 agreement over all texts against physical bytes, with their bars.

    A line for each alpha_high and pair of formats over alpha_low, a point for every other setting but `full`.
    Raises SiftKVError when the picture cannot be written.
    """
    overall = [s for s in summaries if s.text == ALL_TEXTS]
    figure = new_figure(11, 4.8)
    kl, top1 = figure.subplots(1, 2)
    _curves(kl, overall, lambda s: s.mean_kl)
    _curves(top1, overall, lambda s: s.top1)
    kl.set_yscale("log")
    kl.axhline(DIFFKV_KL, **_BAR)
    kl.set_ylabel("mean KL(full || sifted), nats per token")
    top1.axhline(DIFFKV_TOP1, **_BAR)
    top1.set_ylabel("same likeliest token as full, %")
    for axes in (kl, top1):
        axes.axvline(100 * DIFFKV_RATIO, **_BAR)
        axes.set_xlabel("physical KV bytes, % of bf16")
        plain_axes(axes)
    handles, labels = kl.get_legend_handles_labels()
    if handles:
        style = {"frameon": False, "fontsize": 8, "title": "diffkv, over alpha_low", "title_fontsize": 8}
        figure.legend(handles, labels, loc="outside right upper", **style)
    save_figure(figure, path, title)


def _curves(axes: Any, overall: Sequence[Summary], value: Callable[[Summary], float]) -> None:
    lines: dict[tuple[str, str, float], list[tuple[float, Summary]]] = {}
    for s in overall:
        policy = parse_policy(s.kv)
        if isinstance(policy, DiffKV) and isinstance(policy.alpha_high, float) and isinstance(policy.alpha_low, float):
            lines.setdefault((policy.high, policy.low, policy.alpha_high), []).append((policy.alpha_low, s))
        elif not isinstance(policy, Full):
            axes.plot(100 * s.ratio, value(s), "o", color=_POINT, markersize=5, zorder=3)
            axes.annotate(s.kv, (100 * s.ratio, value(s)), xytext=(6, 3), textcoords="offset points", fontsize=7)
    for color, (key, points) in zip(_shades(len(lines)), sorted(lines.items()), strict=True):
        curve = [s for _, s in sorted(points, key=lambda point: point[0])]
        x, y = [100 * s.ratio for s in curve], [value(s) for s in curve]
        high, low, alpha_high = key
        axes.plot(x, y, marker=".", color=color, linewidth=1.4, label=f"{high}, {low}, alpha_high {alpha_high:g}")


def _shades(count: int) -> list[Any]:
    """Light to dark as a threshold grows."""
    from matplotlib import colormaps

    return [colormaps["viridis_r"](0.15 + 0.8 * i / max(1, count - 1)) for i in range(count)]


def plot_cpu(speeds: Sequence[Speed], path: str | Path, title: str) -> None:
    """Prefill and decode speed of every setting as a multiple of that of `transformers`, case by case, with their bars.

    Raises SiftKVError when the picture cannot be written.
    """
    figure = new_figure(9, 4.2)
    settings = list(dict.fromkeys(s.engine for s in speeds if s.engine != TRANSFORMERS))
    cases = list(dict.fromkeys(s.case for s in speeds))
    for part, (axes, what) in enumerate(zip(figure.subplots(1, 2), ("prefill", "decode"), strict=True)):
        width = 0.8 / max(1, len(settings))
        for i, kv in enumerate(settings):
            own = [next(s for s in speeds if s.engine == kv and s.case == case) for case in cases]
            shares = [against_transformers(speeds, s)[part] for s in own]
            color, shift = SERIES[i % len(SERIES)], (i - (len(settings) - 1) / 2) * width
            axes.bar([j + shift for j in range(len(cases))], shares, 0.92 * width, color=color, label=kv, zorder=2)
            bar = DECODE_BARS.get(parse_policy(kv).name) if what == "decode" else PREFILL_BAR
            if bar is not None:
                axes.axhline(bar, **(_BAR | {"color": color if what == "decode" else _BAR["color"], "zorder": 3}))
        axes.axhline(1.0, color=_POINT, linewidth=0.9, zorder=3)
        axes.set_xticks(range(len(cases)), [f"{c.context}\nx {c.batch}" for c in cases])
        axes.set_xlabel("prompt tokens x requests")
        axes.set_ylabel(f"{what} speed, x transformers")
        plain_axes(axes)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    save_figure(figure, path, title)


def plain_axes(axes: Any) -> None:
    """No frame, light lines."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6, zorder=0)
    axes.tick_params(which="both", labelsize=8)
