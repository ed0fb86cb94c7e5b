"""Pictures of what a sifted cache keeps: how much of each head, and which tokens."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from siftkv.engine.outputs import DROPPED, KVReport
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from torch import Tensor

WINDOW_COLOUR = "#f28e2b"
DROPPED_COLOUR = "#e6e6e6"
TIER_COLOURS = ("#08306b", "#2f7fc1", "#9ecae1", "#d0e6f5")
"""Dark to light: most precise tier to least."""

_ANNOTATE_UP_TO = 400
"""Heads up to which each cell of the heatmap shows its number."""

_TITLE_LETTERS = 11
"""Letters of a title that fit an inch."""

_LINE = 128
"""Tokens on one line of a picture of fates."""


def kept_share(report: KVReport) -> NDArray[np.float64]:
    """Share of all tokens that each head keeps, in whatever tier: `[L, H]`, 0 to 1."""
    entries = np.asarray(report.per_head_tokens, dtype=np.float64)  # [L, H, tiers]
    dropped = list(report.tokens_by_tier).index(DROPPED)
    share: NDArray[np.float64] = 1.0 - entries[..., dropped] / max(1, report.tokens_seen)
    return share


def plot_kept(reports: Mapping[str, KVReport], path: str | Path, title: str) -> None:
    """Heatmap of the tokens that each head of each layer keeps, a panel a policy. reports: by the panel's name.

    Raises SiftKVError when the file cannot be written.
    """
    shares = {name: kept_share(report) for name, report in reports.items()}
    layers, heads = next(iter(shares.values())).shape
    figure = new_figure(13, 1.1 + len(shares) * (0.8 + 0.34 * heads))
    axes = figure.subplots(len(shares), 1, squeeze=False)[:, 0]
    for axis, (name, share) in zip(axes, shares.items(), strict=True):
        image = axis.imshow(share.T * 100, cmap="viridis", vmin=0, vmax=100, aspect="auto")
        axis.set_title(f"{name}  ({reports[name].ratio:.0%} of the bytes of bf16)", loc="left", fontsize=10)
        axis.set_yticks(range(heads), [f"head {h}" for h in range(heads)])
        axis.set_xticks(range(layers))
        axis.tick_params(length=0, labelsize=8)
        if share.size <= _ANNOTATE_UP_TO:
            _annotate(axis, share)
    axes[-1].set_xlabel("layer")
    figure.colorbar(image, ax=list(axes), label="tokens kept, %", fraction=0.03, pad=0.01)
    save_figure(figure, path, title)


def _annotate(axis: Any, share: NDArray[np.float64]) -> None:
    for (layer, head), value in np.ndenumerate(share):
        colour = "white" if value < 0.6 else "black"
        axis.text(layer, head, f"{value * 100:.0f}", ha="center", va="center", fontsize=7.5, color=colour)


def pick_heads(report: KVReport, count: int = 6) -> list[tuple[int, int]]:
    """(layer, head) of `count` heads, evenly spaced in rank, from the one that keeps most to the least."""
    share = kept_share(report)
    order = np.argsort(-share, axis=None, kind="stable")
    ranks = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [(int(i) // share.shape[1], int(i) % share.shape[1]) for i in order[ranks]]


def plot_fates(fates: Mapping[tuple[int, int], Tensor], tiers: Sequence[str], path: str | Path, title: str) -> None:
    """The fate of each token along a text, a panel a head, read like a page: left to right, then down.

    fates: int8 `[tokens]` by (layer, head), as `siftkv.engine.fates.token_fates` gives them. tiers: names of the pool's
    tiers, in their order; those that no token of `fates` is in are left out. Raises SiftKVError when the file cannot be
    written.
    """
    codes = {key: np.asarray(fate, dtype=np.int64) for key, fate in fates.items()}
    lines = -(-max(len(code) for code in codes.values()) // _LINE)
    columns = min(2, len(codes))
    rows = -(-len(codes) // columns)
    figure = new_figure(6.6 * columns, 1.2 + rows * (0.5 + 0.11 * lines))
    axes = figure.subplots(rows, columns, squeeze=False).flat
    used = sorted({int(code) for code in np.unique(np.concatenate(list(codes.values())))}, key=lambda c: (c < 0, c))
    names = {**dict(enumerate(tiers)), len(tiers): "window and first tokens", -1: DROPPED}
    colours = dict(zip((c for c in used if 0 <= c < len(tiers)), TIER_COLOURS, strict=False))
    colours |= {len(tiers): WINDOW_COLOUR, -1: DROPPED_COLOUR}
    for axis, ((layer, head), code) in zip(axes, codes.items(), strict=False):
        _fate_page(axis, code, lines, used, [colours[c] for c in used])
        kept = f"keeps {(code >= 0).mean():.0%} of {len(code)} tokens"
        axis.set_title(f"layer {layer}, head {head}: {kept}", loc="left", fontsize=9)
    for axis in list(axes)[len(codes) :]:
        axis.set_visible(False)
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colours[c], label=names[c]) for c in used]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=9)
    save_figure(figure, path, f"{title}\nRead a panel like a page; numbers are the position of a line's first token.")


def _fate_page(axis: Any, code: NDArray[np.int64], lines: int, used: list[int], colours: list[str]) -> None:
    from matplotlib.colors import ListedColormap

    page = np.full(lines * _LINE, np.nan)
    page[: len(code)] = [used.index(c) for c in code]
    limits = {"vmin": -0.5, "vmax": len(used) - 0.5}
    axis.pcolormesh(page.reshape(lines, _LINE), cmap=ListedColormap(colours), edgecolors="white", lw=0.25, **limits)
    axis.invert_yaxis()
    axis.set_yticks(np.arange(0, lines, 4) + 0.5, [str(i * _LINE) for i in range(0, lines, 4)])
    axis.set_xticks([])
    axis.tick_params(length=0, labelsize=7)
    axis.spines[:].set_visible(False)


def new_figure(width: float, height: float) -> Any:
    """A figure of its own (inches), so that nobody's matplotlib backend is touched."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def log_scale(axes: Any) -> None:
    """A logarithmic y axis with plain numbers, also where it spans less than a decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def save_figure(figure: Any, path: str | Path, title: str) -> None:
    """Write a figure under a title, wrapped to its width. Raises SiftKVError when the file cannot be written, or its
    ending is no picture's.
    """
    width = int(_TITLE_LETTERS * figure.get_figwidth())
    wrapped = "\n".join(textwrap.fill(line, width) for line in title.split("\n"))
    figure.suptitle(wrapped, fontsize=11, x=0.008, ha="left")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise SiftKVError(f"cannot write the picture {path}: {getattr(error, 'strerror', None) or error}") from error
