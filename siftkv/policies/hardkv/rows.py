"""What selection starts from: the attention of a request's last queries over the tokens that one layer's heads keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerTokens:
    """One layer of one request as selection sees it: tokens in order of position, padded to the longest head.

    q: fp32 `[W, H*G, D]`, the last queries; q_position: int64 `[W]`, ascending. k: fp32 `[H, n, D]`, plain keys after
        RoPE. position: int64 `[H, n]`, -1 = padding. candidate: bool `[H, n]`, tokens whose place is in question (no
        sinks, no window). weight, score: fp32 `[H, n]`, log-weights and mean attention; None = zeros.
    """

    q: Tensor
    q_position: Tensor
    k: Tensor
    position: Tensor
    candidate: Tensor
    weight: Tensor | None = None
    score: Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.q.shape[1] // self.k.shape[0]

    def heads(self, part: slice) -> LayerTokens:
        """The same for some of the kv heads."""
        q = self.q.unflatten(1, (self.k.shape[0], self.group))[:, part].flatten(1, 2)
        weight, score = (None if x is None else x[part] for x in (self.weight, self.score))
        return LayerTokens(q, self.q_position, self.k[part], self.position[part], self.candidate[part], weight, score)


@dataclass(frozen=True)
class Rows:
    """Attention rows of the heads, one a query and query head: `R = W * G`, or `R = W` where a group shares a row.

    logits: fp32 `[H, R, n]`, whose softmax is `raw`; -inf where a row does not see a token. raw: fp32 `[H, R, n]`,
        probabilities. visible: bool `[H, R, n]`.
    """

    logits: Tensor
    raw: Tensor
    visible: Tensor


def attention_rows(tokens: LayerTokens, union: bool = True) -> Rows:
    """Softmax of each query and query head over the tokens at or before it (Hard-KV, arXiv 2606.28831, section 3.2).

    union: a row for every query head; else the maximum over the group's probabilities, made a distribution again.
    """
    heads, _, dim = tokens.k.shape
    q = tokens.q.unflatten(1, (heads, tokens.group)).permute(1, 2, 0, 3)  # [H, G, W, D]
    logits = torch.einsum("hgwd,hnd->hgwn", q, tokens.k) * dim**-0.5
    if tokens.weight is not None:
        logits += tokens.weight[:, None, None]
    position = tokens.position[:, None, :]
    seen = (position >= 0) & (position <= tokens.q_position[:, None])  # [H, W, n]
    logits.masked_fill_(~seen[:, None], -torch.inf)
    raw = logits.softmax(-1).nan_to_num_(0.0)  # a row that sees nothing has no attention
    if union:
        seen = seen[:, None].expand(raw.shape).flatten(1, 2)
        return Rows(logits.flatten(1, 2), raw.flatten(1, 2), seen)
    most = raw.amax(1)
    most = most / most.sum(-1, keepdim=True).clamp_min(torch.finfo(most.dtype).tiny)
    return Rows(most.log().masked_fill(~seen, -torch.inf), most, seen)


def score_rows(tokens: LayerTokens) -> Rows:
    """One row a head that needs no queries: the tokens' mean attention so far, made a distribution."""
    assert tokens.score is not None
    seen = (tokens.position >= 0)[:, None]
    score = tokens.score[:, None] * seen
    raw = score / score.sum(-1, keepdim=True).clamp_min(torch.finfo(score.dtype).tiny)
    return Rows(raw.log(), raw, seen)


def top_p_count(probability: Tensor, visible: Tensor, p: float) -> Tensor:
    """Smallest number of largest probabilities whose sum reaches `p`: int64 `[...]` of fp32 `[..., n]`.

    With p = 1 it is every visible token, those of probability 0 included, so that rounding drops nothing.
    """
    all_of_them = visible.sum(-1)
    if p >= 1.0:
        return all_of_them
    largest = probability.sort(-1, descending=True).values
    return count_to(largest, p).minimum(all_of_them)


def count_to(largest: Tensor, p: float) -> Tensor:
    """How many of the probabilities `[..., n]`, largest first, it takes to reach `p`: int64 `[...]`."""
    return (largest.cumsum(-1, dtype=torch.float64) < p).sum(-1) + 1
