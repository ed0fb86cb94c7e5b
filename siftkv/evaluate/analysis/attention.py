"""What exact attention over a prompt looks like: spans of scores and value norms, tokens that matter, by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.attention import causal_attention
from siftkv.models import Decoder

COVERAGE = 0.95
"""Share of a query's attention that its critical tokens hold."""

BINS = torch.arange(-12.0, 4.25, 0.25, dtype=torch.float64)
"""Edges of histograms of decimal logarithms."""

_ROWS = 128


@dataclass(frozen=True)
class Observed:
    """One prompt of T tokens, seen from up to 128 queries of its second half.

    scores, norms: int64 `[bins]`, counts of log10 of attention weights and of value norms, between BINS. critical: fp64
    `[L, H]`, mean share of the tokens before a query that hold 95 % of its attention. importance: fp32 `[L, H, T]`,
    mean attention from every other of the queries. kept: fp32 `[L, H, T]`, mean attention of the remaining queries to
    the n + 1 most important tokens.
    """

    scores: Tensor
    norms: Tensor
    critical: Tensor
    importance: Tensor
    kept: Tensor


@torch.inference_mode()
def observe(decoder: Decoder, prompt_ids: Sequence[int]) -> Observed:
    """Run a prompt of at least 8 tokens with exact attention and measure it. Results lie on the CPU."""
    length = len(prompt_ids)
    probe = _Probe(length, decoder.device)
    decoder(torch.tensor(prompt_ids, device=decoder.device), torch.arange(length, device=decoder.device), probe)
    critical, importance, kept = (torch.stack(x).cpu() for x in (probe.critical, probe.importance, probe.kept))
    return Observed(probe.scores, probe.norms, critical.double(), importance, kept)


class _Probe:
    """The `attend` callback that also looks at what it computes."""

    def __init__(self, length: int, device: torch.device) -> None:
        first = length // 2
        count = min(_ROWS, length - first) // 2 * 2
        self.rows = torch.linspace(first, length - 1, count, device=device).long()
        self.scores = torch.zeros(len(BINS) - 1, dtype=torch.int64)
        self.norms = torch.zeros(len(BINS) - 1, dtype=torch.int64)
        self.critical: list[Tensor] = []
        self.importance: list[Tensor] = []
        self.kept: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[T, Hq, D]`, k and v `[T, H, D]` to `[T, Hq, D]`."""
        group = q.shape[1] // k.shape[1]
        heads = [self._head(q[self.rows, h * group : (h + 1) * group], k[:, h]) for h in range(k.shape[1])]
        for found, values in zip((self.critical, self.importance, self.kept), zip(*heads, strict=True), strict=True):
            found.append(torch.stack(values))
        self.norms += _histogram(v.float().norm(dim=-1).flatten())
        out: Tensor = causal_attention(q, k, v)[0]
        return out

    def _head(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q `[M, G, D]`, k `[T, D]`: critical share `[]`, importance `[T]`, kept `[T]`."""
        logits = torch.einsum("mgd,td->mgt", q.float(), k.float()) * q.shape[-1] ** -0.5
        future = torch.arange(k.shape[0], device=k.device) > self.rows[:, None]  # [M, T]
        weight = logits.masked_fill(future[:, None], -torch.inf).softmax(-1)
        self.scores += _histogram(weight[~future[:, None].expand_as(weight)])
        needed = (weight.sort(-1, descending=True).values.cumsum(-1) < COVERAGE).sum(-1) + 1  # [M, G]
        critical = (needed / (self.rows[:, None] + 1)).mean()
        seen = (~future[::2]).sum(0).clamp_min(1) * q.shape[1]
        importance = weight[::2].sum((0, 1)) / seen
        order = importance.argsort(descending=True)
        return critical, importance, weight[1::2].mean((0, 1))[order].cumsum(0)


def _histogram(values: Tensor) -> Tensor:
    """Counts of log10 of non-negative values between BINS; what lies outside counts in the outermost."""
    logs = values.double().clamp_min(1e-300).log10().clamp(float(BINS[0]), float(BINS[-1]) - 1e-9).cpu()
    return torch.histc(logs, len(BINS) - 1, float(BINS[0]), float(BINS[-1])).long()


def quantile(counts: Tensor, share: float) -> float:
    """log10 below which `share` of what a histogram counted lies, to the width of a bin."""
    place = torch.searchsorted(counts.cumsum(0).double(), share * float(counts.sum()))
    return float(BINS[min(int(place), len(BINS) - 2)] + BINS[min(int(place), len(BINS) - 2) + 1]) / 2


def span(counts: Tensor) -> float:
    """Orders of magnitude between the smallest and the largest hundredth."""
    return quantile(counts, 0.99) - quantile(counts, 0.01)


def kept_attention(observed: Observed, budget: float, dynamic: bool) -> Tensor:
    """Attention that heads keep, fp32 `[L, H]`, when a share `budget` of all their tokens is kept.

    dynamic: the most important tokens of all heads together, so that heads keep different numbers; else every head
    keeps as many.
    """
    layers, heads, tokens = observed.importance.shape
    count = torch.full((layers, heads), max(1, round(budget * tokens)))
    if dynamic:
        total = max(1, round(budget * observed.importance.numel()))
        threshold = observed.importance.flatten().topk(total).values[-1]
        count = (observed.importance >= threshold).sum(-1)
    kept = observed.kept.gather(-1, (count - 1).clamp_min(0)[..., None])[..., 0]
    return torch.where(count > 0, kept, 0.0)
