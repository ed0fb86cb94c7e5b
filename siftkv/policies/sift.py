"""`sift:ratio=0.25`: how many tokens a head keeps by top-p, how well by precision tiers, solved to a budget of bytes.

What decides (measured on SmolLM2 and Qwen2.5-Coder, see the project's results):

- The score of a prompt token is the norm of its value times its attention, from two sources, each made a distribution
  and added: the mean of all later queries, and the mean of the last `observe` queries averaged over neighbouring
  positions. The first knows what is used always, the second what is used now; texts differ in which matters.
- Per head the tokens that hold a share `e` of that mass stay, those that hold the first `1 - contrast (1 - e)` of it at
  high precision (top-p: Hard-KV, arXiv 2606.28831; tiers: DiffKV, arXiv 2412.03131). One `e` for all heads of a layer,
  found by bisection so that pages, window and tables together take `ratio` of a 16-bit cache: a head whose attention is
  concentrated keeps fewer tokens than a diffuse one.
- While decoding, a head's tiers hold the same shares of what the request has seen: what enters displaces the weakest,
  high to low to gone. Scores start from the prompt's and go on learning, the older the observation the less it counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

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
from siftkv.policies.importance import observation_rows, sampled_rows

_CANDIDATES, _ROUNDS = 256, 3
"""Shares tried at once, and how often a share is looked for between two of them: to 24 bits in few launches."""
_MARGIN = 0.98
"""Of the budget that is spent: part pages are known on average only."""
_LEAST_LEARNED = 64
"""Tokens beyond the window from which a prompt tells heads apart."""


@dataclass(frozen=True)
class Sift(Policy):
    """Keep a cache at a share of its 16-bit size, wherever a token's place and precision lose least.

    ratio: physical bytes by those of a 16-bit cache, windows and tables counted. Short requests, whose 16-bit window
        alone is more than that, get half of `ratio` for what is beyond the window.
    high, low: formats of the tiers. contrast: how much faster high precision falls off than tokens do.
    blend: weight of the mean over all queries, the rest goes to the last `observe` queries, averaged over `pool`
        positions (odd). sample: 1 in so many query rows is measured for the former.
    window, sinks: recent and first tokens at 16 bits. interval: positions between two updates of scores. horizon:
        observations over which a score is a mean.
    """

    name: ClassVar[str] = "sift"
    exact_window: ClassVar[bool] = True

    ratio: float = 0.25
    high: str = "k4v4c"
    low: str = "k4v2c"
    contrast: float = 30.0
    blend: float = 0.5
    observe: int = 256
    pool: int = 15
    window: int = 16
    sinks: int = 4
    sample: int = 8
    interval: int = 8
    horizon: int = 256

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        for name in ("observe", "pool", "sample", "interval", "horizon"):
            check_whole(name, getattr(self, name), 1)
        if not 0 < self.ratio <= 1:
            raise PolicyError(f"ratio={self.ratio}: use a share of the 16-bit size, above 0 and at most 1")
        if not self.contrast >= 1:
            raise PolicyError(f"contrast={self.contrast}: use 1 or more")
        if not 0 <= self.blend <= 1:
            raise PolicyError(f"blend={self.blend}: use a weight between 0 and 1")
        if self.pool % 2 == 0:
            raise PolicyError(f"pool={self.pool}: use an odd number of positions")
        check_pair(self.high, self.low)

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(TierFormat.parse(self.high)), Tier(TierFormat.parse(self.low)))

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        return sampled_rows(length, self.sample)

    def classify(self, prompt: PromptView) -> Tensor:
        bits = [t.format.key_bits + t.format.value_bits for t in self.tiers("bf16")]
        return self.sift(prompt, Prices(tuple(b / 32 for b in bits), 0.0, 0.0, 1.0)).tier

    def sift(self, prompt: PromptView, prices: Prices) -> Sifted:
        mass = self.mass(prompt)
        middle = max(0, prompt.length - self.window - self.sinks)
        kept, high = self._counts(mass, prompt.protected, self._budget(prompt.length, middle, prices), prices)
        best = mass.masked_fill(prompt.protected, -1.0).argsort(dim=-1, descending=True)
        rank = torch.empty_like(best).scatter_(-1, best, prompt.position.expand(best.shape))
        tier = torch.full(mass.shape, DROPPED, dtype=torch.int8, device=mass.device)
        tier.masked_fill_(rank < kept[..., None], 1).masked_fill_(rank < high[..., None], 0)
        if middle < _LEAST_LEARNED:
            share = self._even_share(prices).to(mass).expand(*mass.shape[:2], 2)
        else:
            share = torch.stack([high, kept - high], -1).float() * self._growth(prompt.length, prices) / prompt.length
        return Sifted(tier, mass * prompt.score.sum(-1, keepdim=True), share)

    def mass(self, prompt: PromptView) -> Tensor:
        """What each token is worth, fp32 `[R, H, n]`; adds up to one a head."""
        norm = 1.0 if prompt.v is None else torch.linalg.vector_norm(prompt.v, dim=-1, dtype=torch.float32).mT
        always = _distribution(prompt.score * norm)
        if self.blend == 1 or prompt.measure is None:
            return always
        recent = prompt.measure(*observation_rows(prompt.length, self.observe))
        recent = F.avg_pool1d(recent.flatten(0, 1), self.pool, 1, self.pool // 2, count_include_pad=False)
        return self.blend * always + (1 - self.blend) * _distribution(recent.view(always.shape) * norm)

    def _budget(self, length: int, middle: int, prices: Prices) -> float:
        """Bytes a head for tokens beyond the window, in full pages."""
        beyond = self.ratio * length * prices.full - prices.slot - prices.page  # half a page in each of two tiers
        return _MARGIN * max(beyond, self.ratio / 2 * middle * prices.full)

    def _growth(self, length: int, prices: Prices) -> float:
        """How much larger a share of the tokens the budget is at twice the length, where the window weighs half."""
        now, later = (self.ratio * prices.full - (prices.slot + prices.page) / n for n in (length, 2 * length))
        return min(2.0, later / now) if now > 0 else 2.0

    def _counts(self, mass: Tensor, protected: Tensor, budget: float, prices: Prices) -> tuple[Tensor, Tensor]:
        """Tokens that each head keeps, and how many of them in the high tier: int64 `[R, H]` each, on average over the
        heads of a layer no more than `budget` bytes.
        """
        inside = (mass * protected).sum(-1, keepdim=True)
        falling = mass.masked_fill(protected, 0.0).sort(dim=-1, descending=True).values
        reached = (falling.cumsum(-1) + inside).contiguous()
        middle = (~protected).sum()
        step = torch.arange(_CANDIDATES, device=mass.device) / _CANDIDATES
        low, width = torch.zeros(mass.shape[0], 1, 1, device=mass.device), 1.0
        for _ in range(_ROUNDS):
            kept, high = self._kept(reached, low + width * step, middle)
            bytes_a_head = (high * prices.token[0] + (kept - high) * prices.token[1]).float().mean(1)
            last = (bytes_a_head <= budget).sum(-1).clamp_min(1) - 1
            low, width = low + width * step[last][:, None, None], width / _CANDIDATES
        kept, high = self._kept(reached, low, middle)
        return kept[..., 0], high[..., 0]

    def _kept(self, reached: Tensor, share: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
        """Counts `[R, H, C]` at which cumulative masses `[R, H, n]` reach each share `[R, 1, C]` and its high part."""
        heads = reached.shape[:2]

        def count(wanted: Tensor) -> Tensor:
            found = torch.searchsorted(reached, wanted.expand(*heads, -1).contiguous()) + (wanted > 0)
            return torch.minimum(found, middle)

        kept = count(share)
        return kept, torch.minimum(count((1 - self.contrast * (1 - share)).clamp_min(0.0)), kept)

    def _even_share(self, prices: Prices) -> Tensor:
        """fp32 `[2]`, shares of a request's tokens that use up `ratio` where heads cannot be told apart."""
        (high, low), budget = prices.token, self.ratio * prices.full
        best = min(1.0, max(0.0, (budget - low) / (high - low)))
        return torch.tensor([best, min(1 - best, max(0.0, budget - best * high) / low)])

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        shape = (num_layers, num_kv_heads, 2)
        return DecodeRule(
            torch.zeros(shape),
            torch.full(shape, UNLIMITED),
            min(self.interval, self.window),
            horizon=self.horizon,
        )


def _distribution(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
