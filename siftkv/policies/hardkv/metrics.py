"""What tokens are ranked by. A metric turns attention rows into logits of its own; adding one is a class and an entry
in `METRICS`.

Sources: Hard-KV (arXiv 2606.28831), appendix E; SnapKV (arXiv 2404.14469); R-KV (arXiv 2505.24133); accumulated scores
are those of DiffKV (arXiv 2412.03131).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.policies.hardkv.rows import LayerTokens, Rows

_SMALLEST = 1e-10
"""Added before a logarithm of a score that may be 0."""

_MOST_PAIRS = 1 << 24
"""Pairs of keys that are compared at a time."""


class Metric(Protocol):
    """Ranks the tokens that a row sees; `softmax` of its logits is the metric's own distribution."""

    def logits(self, rows: Rows, tokens: LayerTokens) -> Tensor:
        """fp32 `[H, R, n]`, larger = rather kept; -inf where the row does not see the token."""


@dataclass(frozen=True)
class Attention:
    """The attention itself: a row keeps its own largest probabilities."""

    def logits(self, rows: Rows, tokens: LayerTokens) -> Tensor:
        return rows.logits


@dataclass(frozen=True)
class SnapKV:
    """The largest logit within `pool // 2` positions. Neighbours are told by stored position: tokens that stand side by
    side in memory may be far apart in the text.
    """

    pool: int = 7

    def logits(self, rows: Rows, tokens: LayerTokens) -> Tensor:
        reach = self.pool // 2
        pooled = rows.logits.clone()
        for shift in range(1, min(reach, tokens.position.shape[1] - 1) + 1):
            before, after = slice(None, -shift), slice(shift, None)
            left, right = tokens.position[:, before], tokens.position[:, after]
            near = ((right - left).abs() <= reach) & (left >= 0) & (right >= 0)
            for own, other in ((after, before), (before, after)):
                neighbour = rows.logits[..., other].masked_fill(~near[:, None], -torch.inf)
                pooled[..., own] = pooled[..., own].maximum(neighbour)
        return pooled.masked_fill_(~rows.visible, -torch.inf)


@dataclass(frozen=True)
class RKV:
    """Attention, less what a token shares with others: `share * a - (1 - share) * softmax(similarity)`.

    A key that resembles another above `alike` (cosine) is spared where it is the most recent of them.
    """

    share: float = 0.07
    alike: float = 0.5

    def logits(self, rows: Rows, tokens: LayerTokens) -> Tensor:
        known = tokens.position >= 0
        similarity = redundancy(tokens.k, known, self.alike).masked_fill(~known, -torch.inf)
        mixed = self.share * rows.raw - (1 - self.share) * similarity.softmax(-1)[:, None]
        lowest = mixed.masked_fill(~rows.visible, torch.inf).amin(-1, keepdim=True)
        shifted = (mixed - lowest).masked_fill(~rows.visible, 0.0)
        part = shifted / shifted.sum(-1, keepdim=True).clamp_min(_SMALLEST)
        return (part + _SMALLEST).log().masked_fill(~rows.visible, -torch.inf)


def redundancy(k: Tensor, known: Tensor, alike: float) -> Tensor:
    """Mean cosine of every key with the head's others, fp32 `[H, n]` of k fp32 `[H, n, D]` and known bool `[H, n]`.

    For each key, the last other one that is closer than `alike` does not count. Keys are taken in blocks, so that no
    `n x n` matrix exists.
    """
    unit = F.normalize(k, dim=-1) * known[..., None]
    heads, count = known.shape
    column = torch.arange(count, dtype=torch.int32, device=k.device)
    total = torch.zeros(known.shape, device=k.device)
    block = max(1, _MOST_PAIRS // max(1, heads * count))
    for start in range(0, count, block):
        stop = min(count, start + block)
        cosine = unit[:, start:stop] @ unit.transpose(1, 2)  # [H, block, n]
        cosine.masked_fill_(column[start:stop, None] == column, 0.0)
        last = torch.where(cosine > alike, column, -1).amax(-1, keepdim=True)
        total += cosine.masked_fill_(column == last, 0.0).sum(1)
    return total / known.sum(-1, keepdim=True).clamp_min(1)


@dataclass(frozen=True)
class Accumulated:
    """The mean attention that a token got from all later queries, kept beside it in the cache."""

    def logits(self, rows: Rows, tokens: LayerTokens) -> Tensor:
        assert tokens.score is not None
        return (tokens.score + _SMALLEST).log()[:, None].expand(rows.raw.shape).masked_fill(~rows.visible, -torch.inf)


METRICS: dict[str, Callable[[int], Metric]] = {
    "attention": lambda pool: Attention(),
    "snapkv": SnapKV,
    "rkv": lambda pool: RKV(),
    "accumulated": lambda pool: Accumulated(),
}
"""Every metric by its name, made from the width of the pool."""
