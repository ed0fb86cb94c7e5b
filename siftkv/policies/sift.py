"""`sift:ratio=0.25`: each token where a budget of bytes loses least, in one of three precisions or not at all.

What decides (measured on SmolLM2 and Qwen2.5-Coder, see docs/policies.md):

- A prompt token is worth the mean square of the attention that it got, times its squared value norm: what an error in
  it adds to that of the output (`siftkv.policies.worth`). Two means are added, over the last `observe` queries and over
  queries all along the prompt that are `reach` positions away or more. Few queries have seen the last `young` tokens:
  they count as the layer's average at least. What the queries have not wanted the next one may: `prior`.
- All heads of a layer share one scale. Its best tokens stay, as many as its part of `ratio` of a 16-bit cache has room
  for, window and tables counted; what is worth `contrast` times the least of them is stored in the middle tier, and
  its cube in the top tier. So a head whose attention is concentrated keeps fewer tokens than a diffuse one. The more
  room there is, the further away is what is dropped, and the less it is missed: then `contrast` is less, which drops a
  few tokens more and stores more of the others precisely.
- Layers differ in what the model loses with their tokens (`siftkv.engine.layer_costs` measures it). A layer gets `tilt`
  of its 16-bit size more for each factor e.
- Bytes are spent in pages. A prompt fills every page that it opens but for room in the last tier, in which the `ahead`
  tokens that follow need displace nothing: what a question is about is often what no query has wanted so far. No tier
  opens another page before the request has grown enough to pay for it, and then fills it with what comes. Short
  prompts, with few pages for many tiers, are kept in part pages instead.
- While decoding, a head's tiers hold the same shares of what the request has seen: what enters displaces the weakest,
  from tier to tier and out. Scores start from the prompt's and go on learning, the older the observation the less it
  counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier, TierFormat
from siftkv.kernels.ranking import ALMOST, LEVELS, LEVELS_AN_OCTAVE, TierSizes, WorthRule, at_or_above
from siftkv.policies.base import (
    UNLIMITED,
    DecodeRule,
    Policy,
    Prices,
    PromptView,
    RankedPrompts,
    Sifted,
    check_pair,
    check_whole,
    check_window,
)
from siftkv.policies.importance import sampled_rows
from siftkv.policies.scores import MOST_POOLED
from siftkv.policies.sift_shares import Room, by_rank, shares, to_device
from siftkv.policies.worth import mean_squares, pooled

_NOTIONAL_PAGE = 24
"""Tokens of the top tier in a page, where nothing is known of a cache."""
_LEAST_LEARNED = 64
"""Tokens beyond the window from which a prompt tells heads apart."""
_LATER = 4 / 3
"""Times a prompt's length at which a growing request that is kept in part pages has spent its budget."""
_TYPICAL = (0.125, 0.375, 0.5)
"""Shares of what a prompt keeps that its tiers hold, where nothing is known of a request."""
_LITTLE_ROOM = 256
"""16-bit tokens that a head has room for, up to which `contrast` holds."""
_LESS_CONTRAST = 0.5
"""Octaves by which it falls for each octave of room beyond."""
_LEAST_CONTRAST = 3.0
_LEAST_RATIO = 1e-4
"""Below it nothing is left to share out."""
_LATER_FIRST = 1e-3
"""What a last token is worth more than a first one that is otherwise its equal."""
_LEAST_COST = 1e-7
"""Nats a token, below what can be measured."""
_LEAST_WEIGHT = 0.3
"""Of a layer that hardly matters on the text that layers are measured on: texts differ."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Sift(Policy):
    """Keep a cache at a share of its 16-bit size, wherever a token's place and precision lose least.

    ratio: physical bytes by those of a 16-bit cache, windows and tables counted. Short requests, whose 16-bit window
        alone is more than that, get half of `ratio` for what is beyond the window.
    top, high, low: formats of the tiers. contrast: how many times the least worth that stays is worth `high`, its cube
        `top`, where a head has room for 256 16-bit tokens or fewer; less where it has more. tilt: share of a layer's
        16-bit size that it gets more for each factor e of what the model loses with its tokens; 0 = layers get the
        same.
    observe, reach, distant, pool: worth is a mean over `observe` recent queries, averaged over `pool` positions (odd),
        and `distant` times one over as many that are at least `reach` positions away. young: last tokens that count as
        the average at least. prior: of the average mean square, what every token is taken to have in advance.
    ahead: tokens that follow a prompt for which a head has room before it drops others.
    window, sinks: recent and first tokens at 16 bits. sample: 1 in so many query rows is measured for the scores of
        decoding. interval: positions between two updates of scores. horizon: observations over which a score is a mean.
    """

    name: ClassVar[str] = "sift"
    exact_window: ClassVar[bool] = True

    ratio: float = 0.25
    top: str = "k8v4c"
    high: str = "k4v4c"
    low: str = "k4v2c"
    contrast: float = 10.0
    tilt: float = 0.05
    observe: int = 256
    reach: int = 256
    distant: float = 0.3
    pool: int = 5
    young: int = 64
    prior: float = 0.001
    ahead: int = 40
    window: int = 16
    sinks: int = 4
    sample: int = 8
    interval: int = 8
    horizon: int = 256

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        for name in ("observe", "reach", "sample", "interval", "horizon"):
            check_whole(name, getattr(self, name), 1)
        check_whole("pool", self.pool, 1, MOST_POOLED)
        for name in ("young", "ahead"):
            check_whole(name, getattr(self, name), 0)
        if not _LEAST_RATIO <= self.ratio <= 1:
            raise PolicyError(f"ratio={self.ratio}: use a share of the 16-bit size, {_LEAST_RATIO} to 1")
        if not 1 <= self.contrast < math.inf:
            raise PolicyError(f"contrast={self.contrast}: use a number of 1 or more")
        for name in ("distant", "tilt", "prior"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PolicyError(f"{name}={getattr(self, name)}: use a number of 0 or more")
        if self.pool % 2 == 0:
            raise PolicyError(f"pool={self.pool}: use an odd number of positions")
        check_pair(self.top, self.high)
        check_pair(self.high, self.low)

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return tuple(Tier(TierFormat.parse(name)) for name in (self.top, self.high, self.low))

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        return sampled_rows(length, self.sample)

    @property
    def weighs_layers(self) -> bool:
        return self.tilt > 0

    def classify(self, prompt: PromptView) -> Tensor:
        bits = [(t.format.key_bits + t.format.value_bits) / 32 for t in self.tiers("bf16")]
        return self.sift(prompt, Prices(tuple(bits), _NOTIONAL_PAGE * bits[0], 0.0, 1.0)).tier

    def sift(self, prompt: PromptView, prices: Prices) -> Sifted:
        (worth, ranked), sizes = self.worth(prompt), _sizes(self, prices, self._octaves(prompt.length))
        apart = ranked * (1 + _LATER_FIRST * prompt.position / prompt.length)
        apart = apart.masked_fill(prompt.protected, -1.0)
        room = _rooms(self, prompt.layers, (prompt.length,), worth.shape[1], prices, worth.device)[prompt.layer]
        held, share = shares(at_or_above(apart, LEVELS + sizes.shift[0]), sizes, Room(*room))
        seed = worth.square()
        score = seed / seed.sum(-1, keepdim=True).clamp_min(_TINY) * prompt.score.sum(-1, keepdim=True)
        return Sifted(by_rank(apart, held), score.clamp_max(1.0), share)

    @property
    def worth_rule(self) -> WorthRule:
        return WorthRule(self.observe, self.reach, self.distant, self.pool, self.young, self.prior, _LATER_FIRST)

    def sift_ranked(self, prompts: RankedPrompts, prices: Prices) -> Sifted:
        ranking = prompts.rank(LEVELS + _sizes(self, prices).shift[0])
        device = ranking.above.device
        room = _rooms(self, prompts.layers, prompts.lengths, prompts.heads, prices, device)[prompts.layer]
        octaves = tuple(self._octaves(length) for length in prompts.lengths)
        least, *more = sorted(set(octaves))
        held, share = ranking.share_out(_sizes(self, prices, least), room)
        if more:
            held, share = held.clone(), share.clone()
        for some in more:
            own, theirs = _which(octaves, some, device), ranking.share_out(_sizes(self, prices, some), room)
            held, share = (torch.where(own, x, y) for x, y in zip(theirs, (held, share), strict=True))
        return Sifted(*ranking.place(held), share)

    def worth(self, prompt: PromptView) -> tuple[Tensor, Tensor]:
        """What an error in each token adds to the square error of the layer's output, and the same with the prior, by
        which tokens are ranked: fp32 `[R, H, n]` both.
        """
        if prompt.q is None or prompt.k is None:
            square = pooled(prompt.score.square(), self.pool)
        else:
            recent, distant = mean_squares(prompt.q, prompt.k, self.observe, self.reach)
            square = pooled(recent, self.pool) + self.distant * distant
        norm = torch.ones_like(square) if prompt.v is None else prompt.v.float().square().sum(-1).mT
        worth, others = square * norm, ~prompt.protected
        count = (others.sum() * square.shape[1]).clamp_min(1)
        average, usual = ((x * others).sum((1, 2), keepdim=True) / count for x in (worth, square))
        unseen = prompt.position >= prompt.length - self.young
        worth = torch.where(unseen, torch.maximum(worth, average), worth)
        return worth, worth + self.prior * usual * norm

    def _octaves(self, length: int) -> int:
        """Of room that a head of a prompt has beyond little."""
        return max(0, round(math.log2(max(1.0, self.ratio * length / _LITTLE_ROOM))))

    def _bytes(self, length: float, prices: Prices) -> float:
        """Bytes a head, mean over layers, for tokens beyond the window where a request has `length` tokens."""
        return self.ratio * length * prices.full - prices.slot

    def _growth(self, length: int, prices: Prices) -> float:
        """How much larger a share of the tokens the budget is a little later, where window and tables weigh less."""
        fixed = prices.slot + len(prices.token) * prices.page / 2
        now, later = (self.ratio * prices.full - fixed / n for n in (length, _LATER * length))
        return min(2.0, later / now) if now > 0 else 2.0

    def _weights(self, layers: int, prices: Prices) -> tuple[float, ...]:
        """Of each layer: its share of the bytes by the mean share."""
        costs = prices.costs or (1.0,) * layers
        return _layer_weights(costs, self.tilt / self.ratio, prices.token[0] / (self.ratio * prices.full))

    def check_prices(self, prices: Prices) -> None:
        for better, worse, name in zip(prices.token, prices.token[1:], (self.high, self.low), strict=False):
            if better <= worse:
                raise PolicyError(
                    f"{name} takes no fewer bytes in this cache than the tier above it: use a smaller format"
                )

    def _even_share(self, prices: Prices) -> list[float]:
        """Shares of a request's tokens in each tier that use up `ratio` where heads cannot be told apart."""
        budget = self.ratio * prices.full
        kept = min(1.0, budget / sum(t * p for t, p in zip(_TYPICAL, prices.token, strict=True)))
        share = [t * kept for t in _TYPICAL]
        for tier in range(len(share) - 2, -1, -1):
            left = budget - sum(s * p for s, p in zip(share, prices.token, strict=True))
            more = min(share[tier + 1], max(0.0, left) / (prices.token[tier] - prices.token[tier + 1]))
            share[tier], share[tier + 1] = share[tier] + more, share[tier + 1] - more
        return share

    def _room_of(self, layers: int, length: int, heads: int, prices: Prices) -> list[list[float]]:
        """`Room` of one prompt in every layer, field by field."""
        middle, tiers = max(0, length - self.window - self.sinks), len(prices.token)
        budget, weights = self._bytes(length, prices), self._weights(layers, prices)
        whole, pages = budget >= tiers * prices.page, budget * heads / prices.page
        if not whole:
            budget = max(budget - tiers * prices.page / 2, self.ratio / 2 * middle * prices.full)
        growth, unknown = self._growth(length, prices) / length, middle < _LEAST_LEARNED
        rest = middle, growth, 1 / length
        return [
            [budget * weight * heads, _part(pages, weights, layer), *rest, weight, float(whole), float(unknown)]
            for layer, weight in enumerate(weights)
        ]

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        shape = (num_layers, num_kv_heads, 3)
        return DecodeRule(
            torch.zeros(shape),
            torch.full(shape, UNLIMITED),
            min(self.interval, self.window),
            horizon=self.horizon,
        )


@lru_cache(maxsize=32)
def _rooms(
    policy: Sift, layers: int, lengths: tuple[int, ...], heads: int, prices: Prices, device: torch.device
) -> Tensor:
    """Fields of `Room` in every layer, fp32 `[L, 8, R, 1, 1]`."""
    rows = torch.tensor([policy._room_of(layers, length, heads, prices) for length in lengths])  # [R, L, 8]
    return to_device(rows.permute(1, 2, 0)[..., None, None].contiguous(), device)


@lru_cache(maxsize=64)
def _which(octaves: tuple[int, ...], some: int, device: torch.device) -> Tensor:
    """Prompts that have so many octaves of room, bool `[R, 1, 1]`."""
    return to_device(torch.tensor([n == some for n in octaves])[:, None, None], device)


@lru_cache(maxsize=64)
def _sizes(policy: Sift, prices: Prices, octaves: int = 0) -> TierSizes:
    """octaves: of room, see `Sift._octaves`; the bars of 0 are furthest apart."""
    least = min(policy.contrast, _LEAST_CONTRAST)
    step = LEVELS_AN_OCTAVE * math.log2(max(least, policy.contrast * 2 ** (-_LESS_CONTRAST * octaves)))
    shift = (min(LEVELS, round(3 * step)), min(LEVELS, round(step)), 0)
    more = [a - b for a, b in zip(prices.token, (*prices.token[1:], 0.0), strict=True)]
    a_page = [round(prices.page / price) for price in prices.token]
    return TierSizes(shift, tuple(more), tuple(a_page), tuple(policy._even_share(prices)), float(policy.ahead))


def _part(pages: float, weights: tuple[float, ...], layer: int) -> int:
    """Pages of one layer where all have `pages` on average: rounded so that they add up."""
    before, until = (int(pages * sum(weights[:n]) + ALMOST) for n in (layer, layer + 1))
    return until - before


@lru_cache(maxsize=64)
def _layer_weights(costs: tuple[float, ...], tilt: float, most: float) -> tuple[float, ...]:
    """Weights of mean 1 that rise by `tilt` for each factor e of a layer's cost, as far as there is use for bytes."""
    logs = [math.log(max(cost, _LEAST_COST)) for cost in costs]
    mean = sum(logs) / max(1, len(logs))
    weights = [max(_LEAST_WEIGHT, min(most, 1 + tilt * (log - mean))) for log in logs]
    return tuple(weight * len(weights) / sum(weights) for weight in weights)
