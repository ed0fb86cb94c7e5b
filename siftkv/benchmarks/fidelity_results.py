"""Fidelity measurements as averages, rows with bars, and JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from siftkv.benchmarks.fidelity import Measurement
from siftkv.benchmarks.results import Row
from siftkv.policies import DiffKV, Uniform, parse_policy

ALL_TEXTS = "mean of all texts"
K8V4_KL = 0.003
DIFFKV_RATIO = 0.30
DIFFKV_KL = 0.03
DIFFKV_TOP1 = 94.0
"""Bars: nats a token, physical bytes as a share of bf16, nats a token, percent."""


@dataclass(frozen=True)
class Summary:
    """One setting on one text, or on all: means over windows, then over texts (the perplexity ratio's is geometric).

    KL in nats a token, top1 in percent, physical and peak bytes at the end and at most, ratio: physical bytes by those
    of a plain 16-bit cache. tiers: share of the entries in each tier, 0 to 1.
    """

    kv: str
    text: str
    mean_kl: float
    p90_kl: float
    worst_decile_kl: float
    top1: float
    perplexity_ratio: float
    physical_bytes: float
    peak_bytes: float
    ratio: float
    tiers: dict[str, float]


def summarise(measurements: Sequence[Measurement]) -> list[Summary]:
    """For each setting, in order: one summary a text, then that of all texts."""
    found = []
    for kv in dict.fromkeys(m.kv for m in measurements):
        own = [m for m in measurements if m.kv == kv]
        texts = [
            _mean([_single(m) for m in own if m.text == text], text) for text in dict.fromkeys(m.text for m in own)
        ]
        found += [*texts, _mean(texts, ALL_TEXTS)]
    return found


def _single(m: Measurement) -> Summary:
    d, cache = m.divergence, m.cache
    entries = sum(cache.tokens_by_tier.values())
    return Summary(
        kv=m.kv,
        text=m.text,
        mean_kl=d.mean_kl,
        p90_kl=d.p90_kl,
        worst_decile_kl=d.worst_decile_kl,
        top1=100 * d.top1_agreement,
        perplexity_ratio=d.perplexity_ratio,
        physical_bytes=cache.physical_bytes,
        peak_bytes=cache.peak_bytes,
        ratio=cache.ratio,
        tiers={tier: count / entries for tier, count in cache.tokens_by_tier.items()},
    )


def _mean(parts: list[Summary], text: str) -> Summary:
    def mean(field: str) -> float:
        return fmean(getattr(part, field) for part in parts)

    return Summary(
        kv=parts[0].kv,
        text=text,
        mean_kl=mean("mean_kl"),
        p90_kl=mean("p90_kl"),
        worst_decile_kl=mean("worst_decile_kl"),
        top1=mean("top1"),
        perplexity_ratio=math.exp(fmean(math.log(part.perplexity_ratio) for part in parts)),
        physical_bytes=mean("physical_bytes"),
        peak_bytes=mean("peak_bytes"),
        ratio=mean("ratio"),
        tiers={tier: fmean(part.tiers[tier] for part in parts) for tier in parts[0].tiers},
    )


def best_diffkv(summaries: Sequence[Summary]) -> Summary | None:
    """The diffkv setting with the best top-1 agreement over all texts, among those within the bars for bytes and KL.

    Where none is within the bar for KL, the one with the lowest; None where none holds so few bytes.
    """
    small = [s for s in summaries if s.text == ALL_TEXTS and s.ratio <= DIFFKV_RATIO and is_diffkv(s.kv)]
    close = [s for s in small if s.mean_kl <= DIFFKV_KL]
    if close:
        return max(close, key=lambda s: s.top1)
    return min(small, key=lambda s: s.mean_kl, default=None)


def is_diffkv(kv: str) -> bool:
    """Whether a `kv` string names the diffkv policy."""
    return isinstance(parse_policy(kv), DiffKV)


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """The bars that the measured settings are held to, then every setting's figures, text by text and over all."""
    found = _bars(summaries)
    for s in summaries:
        found += [
            Row(what=f"{s.kv}, {s.text}: mean KL", value=s.mean_kl, unit="nats/token"),
            Row(what=f"{s.kv}, {s.text}: top-1 agreement", value=s.top1, unit="%"),
            Row(what=f"{s.kv}, {s.text}: perplexity ratio", value=s.perplexity_ratio, unit="x"),
            Row(what=f"{s.kv}, {s.text}: physical bytes", value=s.ratio, unit="of bf16"),
        ]
    return found


def _bars(summaries: Sequence[Summary]) -> list[Row]:
    overall = [s for s in summaries if s.text == ALL_TEXTS]
    found = [
        Row(what="uniform:k8v4 mean KL", value=s.mean_kl, unit="nats/token", bar=f"<= {K8V4_KL}")
        for s in overall
        if parse_policy(s.kv) == Uniform("k8v4")
    ]
    if any(is_diffkv(s.kv) for s in overall):
        best = best_diffkv(summaries)
        limit = f"best diffkv at <= {DIFFKV_RATIO:.0%} physical"
        kl, top1 = (best.mean_kl, best.top1) if best else (None, None)
        found += [
            Row(what=f"{limit}: setting", value=best.kv if best else None),
            Row(
                what=f"{limit}: physical bytes",
                value=best.ratio if best else None,
                unit="of bf16",
                bar=f"<= {DIFFKV_RATIO}",
            ),
            Row(what=f"{limit}: mean KL", value=kl, unit="nats/token", bar=f"<= {DIFFKV_KL}"),
            Row(what=f"{limit}: top-1 agreement", value=top1, unit="%", bar=f">= {DIFFKV_TOP1}"),
        ]
    return found


def to_data(measurements: Sequence[Measurement], summaries: Sequence[Summary], about: dict[str, Any]) -> dict[str, Any]:
    """What the results file keeps beside its rows. about: how it was measured.

    KL at each position and counts by head are left out: they would be nearly all of the file.
    """
    runs = []
    for m in measurements:
        cache = {key: value for key, value in m.cache.to_dict().items() if key != "per_head_tokens"}
        divergence = {key: value for key, value in m.divergence.to_dict().items() if key != "kl"}
        runs.append({"kv": m.kv, "text": m.text, "window": m.window, "divergence": divergence, "cache": cache})
    return about | {"summaries": [asdict(s) for s in summaries], "runs": runs}
