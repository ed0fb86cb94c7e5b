"""Prompt tokens ranked by what they are worth: what a kernel body is asked that takes a whole batch of prompts.

How many tokens are worth at least so much is counted on a scale of logarithms that is the same everywhere, so that a
policy finds the bars of its tiers without sorting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LEVELS_AN_OCTAVE = 16
"""Steps of the scale for each factor of two."""
LEVELS = 2048
"""Of the scale."""
LOWEST_OCTAVE = -96
"""Logarithm to base 2 of where the scale begins; what is below counts as level 0."""
MOST_POOLED = 1023
"""Positions that a pool may span: work grows with them."""
LEAST_DISTANT = 4
"""Distant queries from which a token's mean over them is believed."""
SCALES = 256
"""Sizes of a layer that are tried when its pages are shared out."""
SOON = 17 / 16
"""Times a prompt's length at which the pages that tiers have opened must fit as they do now."""
ALMOST = 1e-4
"""Of a page, or of a byte: what rounding may lack."""


@dataclass(frozen=True)
class WorthRule:
    """What a prompt token is worth (`siftkv.policies.sift` and `siftkv.policies.worth` say why).

    The mean square attention of the last `observe` queries, averaged over `pool` neighbours, plus `distant` times that
    of up to `observe` queries that follow by `reach` positions or more, times the squared norm of the value. The last
    `young` tokens are worth the average of those that leave the window at least. Tokens rank as if the mean square of
    each were more by `prior` times its average over those that leave the window, and the last one of a prompt as if it
    were worth `later` more than an equal first.
    """

    observe: int
    reach: int
    distant: float
    pool: int
    young: int
    prior: float
    later: float


@dataclass(frozen=True)
class TierSizes:
    """What the tiers of a policy with three of them have in common in all prompts (`siftkv.policies.sift`).

    shift: levels of each tier's bar above that of the lowest. step: bytes of a token more than in the next tier.
    a_page: tokens a page. even: shares of a request's tokens where heads cannot be told apart. ahead: tokens that the
    last tier of a head has room for when a prompt has been placed.
    """

    shift: tuple[int, ...]
    step: tuple[float, ...]
    a_page: tuple[int, ...]
    even: tuple[float, ...]
    ahead: float


class Ranking(Protocol):
    """One layer of neighbouring prompts, ranked."""

    @property
    def above(self) -> Tensor:
        """fp32 `[R, H, W]`, tokens that leave the window and reach each level (`at_or_above`)."""

    def share_out(self, sizes: TierSizes, room: Tensor) -> tuple[Tensor, Tensor]:
        """`siftkv.policies.sift_shares.shares` of what was counted, fp32 `[R, H, 3]` both; room: its fields, fp32
        `[8, R]`.
        """

    def place(self, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Tier of every token and score to keep, int8 and fp32 `[H, T']`, prompts end to end.

        bounds: fp32 `[R, H, t]`, ascending: a token that leaves the window is in the first tier whose bound is above
        its rank, else in none (-1). Scores are in proportion to the square of worth, in sum what the measured
        scores are, and at most 1.
        """


def asked_rows(length: int, start: int, most: int, device: torch.device | None = None) -> Tensor:
    """int64, up to `most` rows of a prompt of `length`, evenly chosen from `start` on."""
    span = length - start
    count = min(most, span)
    return start + torch.arange(count, device=device) * span // max(1, count)


def levels(worth: Tensor) -> Tensor:
    """int64, the level that each worth reaches; -1 for negative ones."""
    level = (worth.log2() - LOWEST_OCTAVE).mul(LEVELS_AN_OCTAVE).floor()
    return level.nan_to_num(nan=0.0).clamp(0, LEVELS - 1).long().masked_fill_(worth < 0, -1)


def at_or_above(worth: Tensor, width: int) -> Tensor:
    """How many tokens reach each of `width` levels: worth fp32 `[R, H, n]`, negative where a token does not count, to
    fp32 `[R, H, W]`.
    """
    counts = torch.zeros(*worth.shape[:-1], width + 1, device=worth.device)
    counts.scatter_add_(-1, levels(worth) + 1, torch.ones_like(worth))
    return counts.flip(-1).cumsum(-1).flip(-1)[..., 1:]
