"""Pictures of an inspection: which tokens each head keeps from trigger to trigger, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siftkv.engine.outputs import DROPPED
from siftkv.evaluate.inspect import Inspection
from siftkv.evaluate.plots import DROPPED_COLOUR, TIER_COLOURS, WINDOW_COLOUR, new_figure, save_figure


def spread_heads(inspection: Inspection, count: int) -> list[tuple[int, int]]:
    """(layer, head) of `count` heads, evenly spaced in rank, from the one that keeps most at the end to the least."""
    kept = np.asarray(inspection.snapshots[-1].kept)
    order = np.argsort(-kept, axis=None, kind="stable")
    ranks = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [(int(i) // kept.shape[1], int(i) % kept.shape[1]) for i in order[ranks]]


def plot_maps(inspection: Inspection, heads: Sequence[tuple[int, int]], path: str | Path) -> None:
    """Kept-token maps, a panel a head: tokens from left to right, triggers from top to bottom. Tokens that stay show as
    vertical stripes, the window as a diagonal. Raises SiftKVError when the file cannot be written.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    tiers = len(inspection.tiers)
    colours = [DROPPED_COLOUR, *TIER_COLOURS[:tiers], WINDOW_COLOUR]
    columns = min(2, len(heads))
    rows = -(-len(heads) // columns)
    figure = new_figure(7 * columns, 1.2 + 2.2 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, (layer, head) in zip(axes, heads, strict=False):
        grid = _map(inspection, layer, head)
        axis.imshow(
            grid, cmap=ListedColormap(colours), vmin=-1.5, vmax=tiers + 0.5, aspect="auto", interpolation="nearest"
        )
        kept = int(inspection.snapshots[-1].kept[layer, head])
        axis.set_title(f"layer {layer}, head {head}: keeps {kept} of {grid.shape[1]} tokens", loc="left", fontsize=9)
        _name_rows(axis, [snapshot.seen for snapshot in inspection.snapshots])
    for axis in axes[len(heads) :]:
        axis.set_visible(False)
    names = [DROPPED, *inspection.tiers, "window and first tokens"]
    handles = [Patch(facecolor=c, label=n) for c, n in zip(colours, names, strict=True)]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    save_figure(figure, path, f"{inspection.model}, {inspection.policy.partition(',window')[0]}: tokens by position")


def _map(inspection: Inspection, layer: int, head: int) -> NDArray[np.float64]:
    """Fates `[snapshots, tokens]` of one head; NaN where a token was not there yet."""
    grid = np.full((len(inspection.snapshots), inspection.snapshots[-1].seen), np.nan)
    for row, snapshot in zip(grid, inspection.snapshots, strict=True):
        row[: snapshot.seen] = snapshot.fates[layer, head].numpy()
    return grid


def _name_rows(axis: Any, seen: list[int]) -> None:
    step = max(1, len(seen) // 6)
    axis.set_yticks(range(0, len(seen), step), [f"after {n}" for n in seen[::step]])
    axis.tick_params(labelsize=7)


def plot_counts(inspection: Inspection, path: str | Path) -> None:
    """Tokens a head over time, the attention that they hold, and how evenly heads are filled. Raises SiftKVError when
    the file cannot be written.
    """
    seen = [snapshot.seen for snapshot in inspection.snapshots]
    kept = np.stack([np.asarray(snapshot.kept) for snapshot in inspection.snapshots])  # [snapshots, L, H]
    triggers = [s.trigger for s in inspection.snapshots if s.trigger is not None]
    figure = new_figure(9, 7.5 if triggers else 5.5)
    axes = figure.subplots(3 if triggers else 2, 1, sharex=True)
    axes[0].plot(seen, kept.reshape(len(seen), -1), color="#9ecae1", lw=0.6)
    axes[0].plot(seen, kept.mean((1, 2)), color="#08306b", lw=2, label="mean of all heads")
    axes[0].plot(seen, seen, color="grey", ls=":", label="all tokens")
    axes[0].set_ylabel("tokens kept")
    axes[0].legend(frameon=False, fontsize=8)
    axes[1].plot(seen, [100 * s.utilisation for s in inspection.snapshots], color="#f28e2b", marker=".")
    axes[1].set_ylabel("utilisation, %")
    axes[1].set_ylim(0, 105)
    if triggers:
        coverage = np.stack([np.asarray(t.coverage.cpu()).reshape(-1) for t in triggers]) * 100
        at = [t.position for t in triggers]
        axes[2].fill_between(at, coverage.min(1), coverage.max(1), color="#d0e6f5", label="least to most")
        axes[2].plot(at, coverage.mean(1), color="#08306b", marker=".", label="mean of all heads")
        axes[2].set_ylabel("attention kept, %")
        axes[2].legend(frameon=False, fontsize=8)
    axes[-1].set_xlabel("tokens of context")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)  # two looks may lie a token apart
    save_figure(figure, path, f"{inspection.model}, {inspection.policy.partition(',window')[0]}")
