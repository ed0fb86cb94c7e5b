"""From votes to places, over all layers of a request: who stays, under a budget a head or a request, or padded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.policies.base import UNLIMITED
from siftkv.policies.hardkv.policy import HardKV
from siftkv.policies.hardkv.selection import capped, filled

_ABOVE_VOTES = 1 << 20
"""Added to the votes of tokens that stay anyway: above any count of votes, and exact in fp32."""


@dataclass(frozen=True)
class Ballot:
    """Votes of one layer, `[H, n]` each.

    candidate: bool, tokens whose place is in question. now: int32, votes of this trigger; total: int32, votes so far
        with these. mass: fp32, mean attention.
    """

    candidate: Tensor
    now: Tensor
    total: Tensor
    mass: Tensor


def fit(policy: HardKV, ballots: list[Ballot], most_tokens: int = UNLIMITED) -> list[Tensor]:
    """Which candidates stay: bool `[H, n]` a layer.

    most_tokens: of all heads and layers together, for a budget in bytes.
    """
    keep = []
    for ballot in ballots:
        voted = (ballot.total if policy.memory else ballot.now) > 0
        keep.append(capped(ballot.candidate & voted, ballot.total, ballot.mass, policy.head_budget))
    if most_tokens < UNLIMITED:
        keep = _within(keep, ballots, most_tokens)
    return _padded(keep, ballots) if policy.layout == "max" else keep


def _within(keep: list[Tensor], ballots: list[Ballot], most: int) -> list[Tensor]:
    """The best `most` tokens by (votes, mass), whatever head they belong to."""
    joined = [torch.cat([x.flatten() for x in parts]) for parts in (keep, *_votes(ballots))]
    left = capped(joined[0], joined[1], joined[2], most)
    return [part.view_as(old) for part, old in zip(left.split([x.numel() for x in keep]), keep, strict=True)]


def _votes(ballots: list[Ballot]) -> tuple[list[Tensor], list[Tensor]]:
    return [b.total for b in ballots], [b.mass for b in ballots]


def _padded(keep: list[Tensor], ballots: list[Ballot]) -> list[Tensor]:
    """Every head of every layer as long as the longest, by the next best tokens."""
    longest = torch.stack([x.sum(-1).max() for x in keep]).max()
    return [
        filled(b.candidate, b.total + kept * _ABOVE_VOTES, b.mass, longest.expand(len(kept)))
        for kept, b in zip(keep, ballots, strict=True)
    ]
