"""What the project promises of `sift` and `uniform:k4v4` on the models that it is measured on, as rows with bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from siftkv.benchmarks.results import Row
from siftkv.evaluate.gate_results import GateSummary
from siftkv.policies import DiffKV, Policy, Sift, Uniform, parse_policy

DIFFKV_SHARE = 0.5
"""Of DiffKV's KL at equal bytes that sift may have."""


@dataclass(frozen=True)
class Bars:
    """Of one model. k4v4: mean KL of `uniform:k4v4`. sift: (mean KL, top-1 agreement) by share of bytes; KL in nats a
    token, shares 0 to 1.
    """

    k4v4: float
    sift: Mapping[float, tuple[float, float]]


BARS = {
    "smollm2-135m-instruct": Bars(0.004, {0.25: (0.005, 0.96), 0.175: (0.012, 0.94)}),
    "qwen2.5-coder-0.5b-instruct": Bars(0.012, {0.25: (0.014, 0.94), 0.175: (0.035, 0.92)}),
    "qwen2.5-coder-1.5b-instruct": Bars(0.003, {0.25: (0.0035, 0.965), 0.175: (0.010, 0.955)}),
}
"""By the name that a model's report gives."""

WINDOW = (1536, 512)
"""Tokens of prompt and tokens fed that the bars are for."""


def bar_rows(model: str, summaries: Sequence[GateSummary]) -> list[Row]:
    """Rows with bars for what was measured; none for a model without bars."""
    bars = BARS.get(model)
    if bars is None:
        return []
    found = [
        Row(what=f"{s.kv}: mean KL", value=_kl(s), unit="nats/token", bar=f"<= {bars.k4v4}")
        for s in summaries
        if parse_policy(s.kv) == Uniform("k4v4")
    ]
    diffkv = _of(summaries, DiffKV)
    for share, (kl, top1) in bars.sift.items():
        small = [s for s in _of(summaries, Sift) if s.size.ratio <= share]
        if not small:
            continue
        best = min(small, key=_kl)
        what = f"sift at <= {share:.1%} ({best.kv}, {best.size.ratio:.1%})"
        agreement = best.metrics["top1_agreement"].value
        found += [
            Row(what=f"{what}: mean KL", value=_kl(best), unit="nats/token", bar=f"<= {kl}"),
            Row(what=f"{what}: top-1 agreement", value=100 * agreement, unit="%", bar=f">= {100 * top1:g}"),
        ]
        equal = kl_at(best.size.ratio, diffkv)
        if equal is not None:
            beside = _kl(best) / equal
            row = Row(
                what=f"{what}: mean KL by diffkv's at equal bytes", value=beside, unit="x", bar=f"<= {DIFFKV_SHARE}"
            )
            found.append(row)
    return found


def kl_at(share: float, summaries: Sequence[GateSummary]) -> float | None:
    """Mean KL at a share of bytes on the curve of the settings that no other beats, log-linear between them; None
    outside of what was measured.
    """
    front: list[tuple[float, float]] = []
    for s in sorted(summaries, key=lambda s: (s.size.ratio, _kl(s))):
        if not front or _kl(s) < front[-1][1]:
            front.append((s.size.ratio, _kl(s)))
    if not front or not front[0][0] <= share <= max(s.size.ratio for s in summaries):
        return None
    shares, kl = zip(*front, strict=True)
    return float(np.exp(np.interp(share, shares, np.log(kl))))


def _of(summaries: Sequence[GateSummary], policy: type[Policy]) -> list[GateSummary]:
    return [s for s in summaries if isinstance(parse_policy(s.kv), policy)]


def _kl(summary: GateSummary) -> float:
    return summary.metrics["mean_kl"].value
