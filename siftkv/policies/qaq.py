"""`qaq`: everything stays, with as many bits as what attention makes of its error asks for, and outliers apart.

Source: "QAQ: Quality Adaptive Quantization for LLM KV Cache" (arXiv 2403.04643), and its authors' code for what the
paper leaves open, at its level of single heads. Keys and values as attention sees them, keys not conditioned: the
lowest and highest channels of each vector are kept at 16 bits, the others quantised between their extremes. Bits follow
from the largest attention that a token got from the last queries, for values and for keys by a formula of their own.

What differs: bits are those of the cheapest of three formats that has enough of both; while decoding, the formats keep
the shares of tokens that they had in the prompt, the least attended moving down, since ranges are not known there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import (
    UNLIMITED,
    DecodeRule,
    Policy,
    Prices,
    PromptView,
    Sifted,
    check_whole,
    check_window,
)
from siftkv.policies.importance import sampled_rows

FORMATS = ("k8v8o1", "k4v4o1", "k2v2o1")
LEAST_BITS, MOST_BITS = 2, 8
_OUTLIERS = 1
"""On either side of a vector: a hundredth of 128 channels, rounded as the authors' code does."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class QAQ(Policy):
    """Bits for every token of every head, from the error that it may have.

    key_error, value_error: the square error of attention's logits and of its output that is aimed at; larger = fewer
        bits. query: the largest number that is expected in a query. last: queries whose attention counts.
    window, sinks: recent and first tokens at 16 bits. sample: 1 in so many query rows is measured for the scores of
        decoding. interval: positions between two updates of scores.
    """

    name: ClassVar[str] = "qaq"

    key_error: float = 10_000.0
    value_error: float = 10.0
    query: float = 3.0
    last: int = 5
    window: int = 16
    sinks: int = 0
    sample: int = 8
    interval: int = 8

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        for name in ("last", "sample", "interval"):
            check_whole(name, getattr(self, name), 1)
        for name in ("key_error", "value_error", "query"):
            if not getattr(self, name) > 0:
                raise PolicyError(f"{name}={getattr(self, name)}: use a number above 0")

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return tuple(Tier(TierFormat.parse(name)) for name in FORMATS)

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        return sampled_rows(length, self.sample)

    def classify(self, prompt: PromptView) -> Tensor:
        if prompt.q is None or prompt.k is None or prompt.v is None:
            return torch.zeros(prompt.score.shape, dtype=torch.int8, device=prompt.score.device)
        attention = largest_attention(prompt.q, prompt.k, self.last)
        keys, values = (x.float().transpose(1, 2) for x in (prompt.k, prompt.v))  # [R, H, n, D]
        key_bits = bits_for(spread(keys), self._key_error(attention, keys.shape[-1]))
        value_bits = bits_for(spread(values), math.sqrt(self.value_error) / prompt.length / attention)
        tier = torch.zeros_like(key_bits, dtype=torch.int8)
        for index, fmt in enumerate(TierFormat.parse(name) for name in FORMATS):
            tier.masked_fill_((key_bits <= fmt.key_bits) & (value_bits <= fmt.value_bits), index)
        return tier

    def _key_error(self, attention: Tensor, dim: int) -> Tensor:
        """The largest error of a key's channel, in the shape of `attention` `[R, H, n]`."""
        most = attention.topk(min(2, attention.shape[-1]), dim=-1)
        others = torch.where(attention == most.values[..., :1], most.values[..., -1:], most.values[..., :1])
        slope = attention * torch.maximum(1 - attention, others)  # max_j |a_i (i = j) - a_i a_j|
        return math.sqrt(self.key_error / dim) / attention.shape[-1] / (self.query * slope.clamp_min(_TINY))

    def sift(self, prompt: PromptView, prices: Prices) -> Sifted:
        tier = self.classify(prompt)
        held = torch.stack([((tier == t) & ~prompt.protected).sum(-1) for t in range(len(FORMATS))], -1).float()
        share = held / held.sum(-1, keepdim=True).clamp_min(1)
        share[..., -1] = torch.inf  # whatever leaves the others stays in the last
        return Sifted(tier, None, share)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        shape = (num_layers, num_kv_heads, len(FORMATS))
        interval = min(self.interval, self.window)
        return DecodeRule(torch.zeros(shape), torch.full(shape, UNLIMITED), interval)


def largest_attention(q: Tensor, k: Tensor, last: int) -> Tensor:
    """The most that each token gets from the last queries, over rows and the heads of a group: fp32 `[R, H, n]`, at
    least the smallest normal number. q: `[R, n, Hq, D]`, k: `[R, n, H, D]`.
    """
    length, heads, dim = k.shape[1:]
    rows = torch.arange(max(0, length - last), length, device=k.device)
    query = q[:, rows].float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)  # [R, H, G, W, D]
    logits = query @ k.float().permute(0, 2, 3, 1)[:, :, None] / math.sqrt(dim)
    later = torch.arange(length, device=k.device) > rows[:, None]
    return logits.masked_fill(later, -math.inf).softmax(-1).amax((2, 3)).clamp_min(_TINY)


def spread(x: Tensor) -> Tensor:
    """Range of each vector `[..., D]` without its outliers: `[...]`."""
    rising = x.sort(dim=-1).values
    return rising[..., -1 - _OUTLIERS] - rising[..., _OUTLIERS]


def bits_for(width: Tensor, error: Tensor) -> Tensor:
    """Bits at which codes over a range of `width` err by `error` at most, within 2 and 8: int64."""
    return (width / (2 * error) + 1).log2().ceil().clamp(LEAST_BITS, MOST_BITS).long()
