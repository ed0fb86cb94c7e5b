"""Which tokens of a layer earn their place: votes of the last queries, and what remains when a cap binds.

Cautious update (Hard-KV, arXiv 2606.28831, section 3.1): every query and query head votes for the tokens that make up
its share `p` of attention; a token stays while it has a vote. There is no filling up: a head whose attention is
concentrated keeps fewer tokens than one whose attention is spread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.policies.hardkv.calibration import HeadCalibration, calibrate
from siftkv.policies.hardkv.metrics import Attention, Metric
from siftkv.policies.hardkv.rows import LayerTokens, Rows, attention_rows, score_rows, top_p_count

_MOST_ELEMENTS = 1 << 23
"""Elements of one tensor of attention rows; heads are taken in parts that stay below."""


@dataclass(frozen=True)
class Votes:
    """What the rows of a layer say of its tokens.

    votes: int32 `[H, n]`, rows that select the token; 0 for sinks, window and padding. mass: fp32 `[H, n]`, mean
        attention of the rows that see the token. share: fp32 `[H, n]`, mean attention of all rows; sums to 1 a head.
    calibration: temperatures, where they are used.
    """

    votes: Tensor
    mass: Tensor
    share: Tensor
    calibration: HeadCalibration | None = None


def vote(
    tokens: LayerTokens,
    p: float,
    metric: Metric,
    union: bool = True,
    calibrated: bool = False,
    known: HeadCalibration | None = None,
) -> Votes:
    """Let every row vote for the tokens it would keep. calibrated: counts by temperature instead of by rank; known:
    temperatures of earlier triggers.
    """
    found = []
    for part in _parts(tokens, union):
        old = known and HeadCalibration(known.temperature[part], known.error[part], known.drift[part])
        found.append(_vote(tokens.heads(part), p, metric, union, calibrated, old))
    return found[0] if len(found) == 1 else _joined(found)


def top_k(tokens: LayerTokens, count: int, metric: Metric, union: bool = True) -> Votes:
    """One vote for each of a head's best `count` candidates by the mean of the metric's own distribution over all rows:
    static selection, which other methods use and this one is compared with.
    """
    found = [_top_k(tokens.heads(part), count, metric, union) for part in _parts(tokens, union)]
    return found[0] if len(found) == 1 else _joined(found)


def _parts(tokens: LayerTokens, union: bool) -> list[slice]:
    """Heads in parts whose attention rows are not too large."""
    rows = max(1, len(tokens.q) * (tokens.group if union else 1))
    heads, count = tokens.position.shape
    at_once = max(1, _MOST_ELEMENTS // max(1, rows * count))
    return [slice(h, min(heads, h + at_once)) for h in range(0, heads, at_once)]


def _joined(parts: list[Votes]) -> Votes:
    votes, mass, share = (torch.cat([getattr(x, name) for x in parts]) for name in ("votes", "mass", "share"))
    kept = [x.calibration for x in parts if x.calibration is not None]
    if not kept:
        return Votes(votes, mass, share)
    joined = (torch.cat([getattr(x, name) for x in kept]) for name in ("temperature", "error", "drift"))
    return Votes(votes, mass, share, HeadCalibration(*joined))


def _vote(
    tokens: LayerTokens, p: float, metric: Metric, union: bool, calibrated: bool, known: HeadCalibration | None
) -> Votes:
    rows = _rows(tokens, union)
    count = top_p_count(rows.raw, rows.visible, p)
    logits = metric.logits(rows, tokens)
    order = ranking(logits, None if isinstance(metric, Attention) else rows.logits)
    calibration = None
    if calibrated and p < 1.0:
        count, calibration = calibrate(logits.gather(-1, order), count, p, known)
    selected = _first(order, count) & rows.visible & tokens.candidate[:, None]
    return _counted(rows, selected.sum(1), calibration)


def _top_k(tokens: LayerTokens, count: int, metric: Metric, union: bool) -> Votes:
    rows = _rows(tokens, union)
    mean = metric.logits(rows, tokens).softmax(-1).nan_to_num(0.0).mean(1)
    nobody = torch.zeros(mean.shape, dtype=torch.int32, device=mean.device)
    return _counted(rows, filled(tokens.candidate, nobody, mean, torch.full_like(nobody[:, 0], count)), None)


def _rows(tokens: LayerTokens, union: bool) -> Rows:
    return attention_rows(tokens, union) if len(tokens.q) else score_rows(tokens)


def _counted(rows: Rows, votes: Tensor, calibration: HeadCalibration | None) -> Votes:
    total = rows.raw.sum(1)
    mass = total / rows.visible.sum(1).clamp_min(1)
    return Votes(votes.to(torch.int32), mass, total / rows.raw.shape[1], calibration)


def ranking(logits: Tensor, tie: Tensor | None) -> Tensor:
    """Indices of tokens, best first: int64 `[..., n]`; equal logits are told apart by `tie`, then the older comes
    first.
    """
    if tie is None:
        return logits.argsort(dim=-1, descending=True, stable=True)
    order = tie.argsort(dim=-1, descending=True, stable=True)
    return order.gather(-1, logits.gather(-1, order).argsort(dim=-1, descending=True, stable=True))


def _first(order: Tensor, count: Tensor) -> Tensor:
    """Bool, like `order`: whether a token is among the first `count` of its row."""
    inside = torch.arange(order.shape[-1], device=order.device) < count[..., None]
    return torch.zeros_like(inside).scatter_(-1, order, inside)


def capped(keep: Tensor, votes: Tensor, mass: Tensor, most: int | Tensor) -> Tensor:
    """`keep` (bool `[..., n]`) without all but the best `most` by (votes, mass); age never counts. Only where
    there are more.
    """
    if isinstance(most, int) and most >= keep.shape[-1]:
        return keep
    limit = most if isinstance(most, int) else most[..., None]
    return keep & (_standing(keep, votes, mass) < limit)


def filled(candidate: Tensor, votes: Tensor, mass: Tensor, count: Tensor) -> Tensor:
    """The best `count` (int64 `[...]`) candidates by (votes, mass), voted for or not: bool `[..., n]`."""
    return candidate & (_standing(candidate, votes, mass) < count[..., None])


def _standing(among: Tensor, votes: Tensor, mass: Tensor) -> Tensor:
    """Place of each token of `among` by (votes, mass), from 0; the others come after them."""
    first = torch.where(among, votes.float(), -1.0)
    order = ranking(first, mass)
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )


def coverage(share: Tensor, keep: Tensor) -> Tensor:
    """Share of the rows' attention that the kept tokens hold, fp32 `[H]`."""
    return (share * keep).sum(-1)


def metric_counts(tokens: LayerTokens, p: float, metric: Metric) -> tuple[Tensor, Tensor]:
    """Tokens that top-p of the metric's own distribution keeps, uncalibrated, and attention's count: int64 `[H, R]`
    each.
    """
    rows = attention_rows(tokens)
    own = metric.logits(rows, tokens).softmax(-1).nan_to_num(0.0)
    return top_p_count(own, rows.visible, p), top_p_count(rows.raw, rows.visible, p)
