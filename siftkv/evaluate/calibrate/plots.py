"""The path of a calibration: KL against bytes, and which heads lose most to 4-bit keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from siftkv.evaluate.plots import log_scale, new_figure, save_figure
from siftkv.policies.profile_file import Profile

_MARKERS = "os^Dv<>"
_CHOSEN, _LIMIT = "#d1495b", "#888888"


def plot_search(profile: Profile, path: str | Path) -> None:
    """Every setting that was tried, numbered in order. Raises SiftKVError when the file cannot be written."""
    figure = new_figure(12.5, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    _draw_path(left, profile)
    _draw_keys(right, profile)
    chosen = profile.policy + (f" with 8-bit keys in {len(profile.precise_keys)} heads" if profile.precise_keys else "")
    save_figure(figure, path, f"Calibration of {profile.model.name}: {chosen}")


def _draw_path(axes: Any, profile: Profile) -> None:
    steps = list(dict.fromkeys(t.step for t in profile.path))
    for i, step in enumerate(steps):
        own = [(n, t) for n, t in enumerate(profile.path, 1) if t.step == step and t.figures.mean_kl > 0]
        x, y = [100 * t.figures.ratio for _, t in own], [t.figures.mean_kl for _, t in own]
        axes.plot(x, y, _MARKERS[i % len(_MARKERS)], ms=5, color=f"C{i}", label=step, alpha=0.8)
        line = sorted(zip(x, y, strict=True))
        axes.plot([p[0] for p in line], [p[1] for p in line], "-", lw=0.7, color=f"C{i}", alpha=0.5)
        for (number, _), *at in zip(own, x, y, strict=True):
            axes.annotate(str(number), at, xytext=(3, 3), textcoords="offset points", fontsize=6.5)
    reached = profile.reached
    axes.plot(100 * reached.ratio, reached.mean_kl, "o", ms=13, mfc="none", mec=_CHOSEN, mew=1.8, label="chosen")
    if profile.held_out is not None:
        held = profile.held_out
        axes.plot(100 * held.ratio, held.mean_kl, "x", ms=8, mew=2, color=_CHOSEN, label="chosen, on other text")
    if profile.target.max_kl is not None:
        axes.axhline(profile.target.max_kl, color=_LIMIT, lw=0.9, ls="--")
    if profile.target.target_ratio is not None:
        axes.axvline(100 * profile.target.target_ratio, color=_LIMIT, lw=0.9, ls="--")
    if any(t.figures.mean_kl > 0 for t in profile.path):
        log_scale(axes)
    axes.set_xlabel("physical KV bytes, % of bf16; numbers: the order of the search")
    axes.set_ylabel("mean KL(full || sifted), nats per token")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _draw_keys(axes: Any, profile: Profile) -> None:
    shift = np.asarray(profile.keys.shift)  # [L, H]
    image = axes.imshow(1000 * shift.T, aspect="auto", cmap="viridis", vmin=0)
    for heads, mark, label in (
        (profile.fragile, "x", "fragile"),
        (profile.precise_keys, "o", "gets 8-bit keys"),
    ):
        if heads:
            x, y = zip(*heads, strict=True)
            axes.plot(x, y, mark, ms=8, mfc="none", mec="white", mew=1.5, ls="", label=label)
    axes.set_xlabel("layer")
    axes.set_ylabel("kv head")
    axes.set_yticks(range(shift.shape[1]))
    axes.set_title("What 4-bit keys do to attention", fontsize=10, loc="left")
    axes.figure.colorbar(image, ax=axes, label="KL of attention, 0.001 nats", location="bottom")
    if profile.fragile or profile.precise_keys:
        axes.legend(fontsize=8, facecolor="#555555", labelcolor="white")
