"""The importance statistic: mean over later queries of the attention a token got, maximum over the GQA group (DiffKV,
section 4.2).

A stored mean needs no count: a token at position `i` seen from position `p` has had `p - i` later queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.kernels.reference.quantize import SCORE_SCALE


def updated_mean(
    mean: Tensor, attention: Tensor, position: Tensor, now: Tensor, interval: Tensor, horizon: Tensor
) -> Tensor:
    """Mean after a refresh at query position `now` whose row stands for the last `interval` queries. All broadcast,
    fp32 and int64.

    A token's own query does not count as a later one, so tokens at `position == now` keep their mean. The mean is that
    of all later queries until there are `horizon` of them, and from then on it forgets: a query `horizon` positions
    back counts 1/e of the newest.
    """
    known = torch.minimum((now - position).clamp_min(0), horizon)
    weight = torch.minimum(known, interval).float() / known.clamp_min(1).float()
    return mean + (attention - mean) * weight


def rounding_noise(position: Tensor, now: Tensor) -> Tensor:
    """13 pseudo-random bits (int32) from a token's position and the query's, the same on every device and in every
    batch.
    """
    mask = 0xFFFFFFFF
    h = (position.long() * 0x9E3779B1 & mask) ^ (now.long() * 0x85EBCA77 & mask)
    h = (h ^ (h >> 15)) * 0x2C1B3C6D & mask
    return ((h ^ (h >> 12)) >> 7 & 0x1FFF).to(torch.int32)


def stochastic_score_bits(score: Tensor, position: Tensor, now: Tensor) -> Tensor:
    """Stored form of scores, rounded up or down at random in proportion, so that a running mean never freezes."""
    bits = (score.clamp(0.0, 1.0) * SCORE_SCALE * 2.0**-112).view(torch.int32)
    return (bits + rounding_noise(position, now)) >> 13
