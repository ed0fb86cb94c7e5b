"""`sift:ratio=0.25`: each token where a budget of bytes loses least, in one of three precisions or not at all.

What decides (measured on SmolLM2 and Qwen2.5-Coder, see docs/policies.md):

- A prompt token is worth the mean square of the attention that it got, times its squared value norm: what an error in
  it adds to that of the output (`siftkv.policies.worth`). Two means are added, over the last `observe` queries and over
  queries all along the prompt that are `reach` positions away or more. Few queries have seen the last `young` tokens:
  they count as the layer's average at least.
- All heads of a layer share one scale. Its best tokens stay, as many as `ratio` of a 16-bit cache has room for, pages,
  window and tables counted; what is worth `contrast` times the least of them is stored in the middle tier, and
  `contrast` cubed in the top tier. So a head whose attention is concentrated keeps fewer tokens than a diffuse one.
- While decoding, a head's tiers hold the same shares of what the request has seen: what enters displaces the weakest,
  from tier to tier and out. Scores start from the prompt's and go on learning, the older the observation the less it
  counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import (
    DROPPED,
    UNLIMITED,
    DecodeRule,
    Policy,
    Prices,
    PromptView,
    Sifted,
    check_pair,
    check_whole,
    check_window,
)
from siftkv.policies.importance import sampled_rows
from siftkv.policies.worth import mean_squares, pooled

_CANDIDATES = 256
"""Counts of tokens that are tried at once."""
_MARGIN = 0.98
"""Of the budget that is spent: part pages are known on average only."""
_LEAST_LEARNED = 64
"""Tokens beyond the window from which a prompt tells heads apart."""
_LATER = 1.2
"""Times a prompt's length at which a growing request spends its budget; before and after it holds a little less."""
_TYPICAL = (0.125, 0.375, 0.5)
"""Shares of what a prompt keeps that its tiers hold, where nothing is known of a request."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Sift(Policy):
    """Keep a cache at a share of its 16-bit size, wherever a token's place and precision lose least.

    ratio: physical bytes by those of a 16-bit cache, windows and tables counted. Short requests, whose 16-bit window
        alone is more than that, get half of `ratio` for what is beyond the window.
    top, high, low: formats of the tiers. contrast: how many times the least worth that stays is worth `high`; its cube
        is worth `top`.
    observe, reach, distant, pool: worth is a mean over `observe` recent queries, averaged over `pool` positions (odd),
        and `distant` times one over as many that are at least `reach` positions away. young: last tokens that count as
        the average at least.
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
    observe: int = 256
    reach: int = 256
    distant: float = 0.3
    pool: int = 5
    young: int = 64
    window: int = 16
    sinks: int = 4
    sample: int = 8
    interval: int = 8
    horizon: int = 256

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        for name in ("observe", "reach", "pool", "sample", "interval", "horizon"):
            check_whole(name, getattr(self, name), 1)
        check_whole("young", self.young, 0)
        if not 0 < self.ratio <= 1:
            raise PolicyError(f"ratio={self.ratio}: use a share of the 16-bit size, above 0 and at most 1")
        if not self.contrast >= 1:
            raise PolicyError(f"contrast={self.contrast}: use 1 or more")
        if not self.distant >= 0:
            raise PolicyError(f"distant={self.distant}: use a weight of 0 or more")
        if self.pool % 2 == 0:
            raise PolicyError(f"pool={self.pool}: use an odd number of positions")
        check_pair(self.top, self.high)
        check_pair(self.high, self.low)

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return tuple(Tier(TierFormat.parse(name)) for name in (self.top, self.high, self.low))

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        return sampled_rows(length, self.sample)

    def classify(self, prompt: PromptView) -> Tensor:
        bits = [t.format.key_bits + t.format.value_bits for t in self.tiers("bf16")]
        return self.sift(prompt, Prices(tuple(b / 32 for b in bits), 0.0, 0.0, 1.0)).tier

    def sift(self, prompt: PromptView, prices: Prices) -> Sifted:
        length, middle = prompt.length, max(0, prompt.length - self.window - self.sinks)
        worth = self.worth(prompt)
        tier = self._tiers(worth, prompt.protected, middle, self._budget(length, middle, prices), prices)
        if middle < _LEAST_LEARNED:
            share = self._even_share(prices).to(worth).expand(*worth.shape[:2], -1)
        else:
            held = torch.stack([(tier == t).sum(-1) for t in range(len(prices.token))], -1)
            share = held.float() * self._growth(length, prices) / length
        mass = worth.sqrt()
        score = mass / mass.sum(-1, keepdim=True).clamp_min(_TINY) * prompt.score.sum(-1, keepdim=True)
        return Sifted(tier, score, share)

    def worth(self, prompt: PromptView) -> Tensor:
        """What an error in each token adds to the square error of the layer's output, fp32 `[R, H, n]`."""
        if prompt.q is None or prompt.k is None:
            square = pooled(prompt.score.square(), self.pool)
        else:
            recent, distant = mean_squares(prompt.q, prompt.k, self.observe, self.reach)
            square = pooled(recent, self.pool) + self.distant * distant
        if prompt.v is not None:
            square = square * prompt.v.float().square().sum(-1).mT
        others = ~prompt.protected
        average = (square * others).sum((1, 2), keepdim=True) / (others.sum() * square.shape[1]).clamp_min(1)
        unseen = prompt.position >= prompt.length - self.young
        return torch.where(unseen, torch.maximum(square, average), square)

    def _tiers(self, worth: Tensor, protected: Tensor, middle: int, budget: float, prices: Prices) -> Tensor:
        """int8 `[R, H, n]`: the layer's best tokens that cost no more than `budget` bytes a head on average."""
        falling, order = worth.masked_fill(protected, -1.0).flatten(1).sort(dim=-1, descending=True, stable=True)
        within = self._counts(falling, middle * worth.shape[1], budget * worth.shape[1], prices)
        rank = torch.arange(order.shape[1], device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, rank)
        tier = torch.full(order.shape, DROPPED, dtype=torch.int8, device=worth.device)
        for index, count in reversed(list(enumerate(within))):
            tier.masked_fill_(rank < count[:, None], index)
        return tier.view(worth.shape)

    def _counts(self, falling: Tensor, total: int, budget: float, prices: Prices) -> list[Tensor]:
        """How many of a layer's tokens, best first, are in each tier or one before it: int64 `[R]` a tier.

        falling: worth of all heads' tokens, fp32 `[R, H n]`. total: those that may be chosen. budget: bytes of them.
        """
        step = [a - b for a, b in zip(prices.token, (*prices.token[1:], 0.0), strict=True)]
        kept = torch.arange(_CANDIDATES + 1, device=falling.device) * total // _CANDIDATES
        least = falling[:, (kept - 1).clamp_min(0)]
        factors = (self.contrast**3, self.contrast)
        tried = [torch.searchsorted(-falling, -least * f, right=True).minimum(kept) for f in factors] + [kept]
        cost = sum((count * price for count, price in zip(tried, step, strict=True)), torch.zeros_like(least))
        fits = ((cost <= budget).sum(-1, keepdim=True) - 1).clamp_min(0)
        within = [count.expand_as(least).gather(1, fits)[:, 0] for count in tried]
        left = budget - cost.gather(1, fits)[:, 0]
        for tier in range(len(within) - 2, -1, -1):  # what is left raises the best of each tier, lowest tier first
            more = (left / step[tier]).long().clamp_min(0).minimum(within[tier + 1] - within[tier])
            within[tier] = within[tier] + more
            left = left - more * step[tier]
        return within

    def _budget(self, length: int, middle: int, prices: Prices) -> float:
        """Bytes a head for tokens beyond the window, in full pages."""
        beyond = self.ratio * length * prices.full - self._fixed(prices)
        return _MARGIN * max(beyond, self.ratio / 2 * middle * prices.full)

    def _fixed(self, prices: Prices) -> float:
        """Bytes a head whatever it keeps: its window and tables, and half a page a tier."""
        return prices.slot + prices.page * len(prices.token) / 2

    def _growth(self, length: int, prices: Prices) -> float:
        """How much larger a share of the tokens the budget is a little later, where window and tables weigh less."""
        now, later = (self.ratio * prices.full - self._fixed(prices) / n for n in (length, _LATER * length))
        return min(2.0, later / now) if now > 0 else 2.0

    def _even_share(self, prices: Prices) -> Tensor:
        """fp32 `[3]`, shares of a request's tokens that use up `ratio` where heads cannot be told apart."""
        budget = self.ratio * prices.full
        kept = min(1.0, budget / sum(t * p for t, p in zip(_TYPICAL, prices.token, strict=True)))
        share = [t * kept for t in _TYPICAL]
        for tier in range(len(share) - 2, -1, -1):
            left = budget - sum(s * p for s, p in zip(share, prices.token, strict=True))
            more = min(share[tier + 1], max(0.0, left) / (prices.token[tier] - prices.token[tier + 1]))
            share[tier], share[tier + 1] = share[tier] + more, share[tier + 1] - more
        return torch.tensor(share)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        shape = (num_layers, num_kv_heads, 3)
        return DecodeRule(
            torch.zeros(shape),
            torch.full(shape, UNLIMITED),
            min(self.interval, self.window),
            horizon=self.horizon,
        )
