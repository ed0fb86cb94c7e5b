"""What policies with a budget share: how many tokens of a prompt a head keeps, which ones, and how decoding goes on.

A budget counts all tokens of a head: sinks and window too.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import DROPPED, UNLIMITED, DecodeRule, Policy, PromptView, check_whole, check_window


def check_budget(ratio: float, budget: int) -> None:
    """Raise PolicyError unless a ratio or a budget in tokens is usable."""
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise PolicyError(f"ratio={ratio!r}: use a share of the tokens above 0, at most 1")
    check_whole("budget", budget, 0)


def check_room(budget: int, near: int) -> None:
    """Raise PolicyError where a budget in tokens does not hold window and sinks."""
    if budget < near:
        raise PolicyError(
            f"a budget of {budget} tokens is below window + sinks = {near}, which every head keeps: raise it"
        )


def check_format(name: str) -> None:
    """Raise PolicyError or FormatError unless `name` is `dense` or a format that does not destroy a model."""
    if not isinstance(name, str):
        raise PolicyError(f"format={name!r}: use dense or the name of a format, such as k4v4")
    if name != "dense" and TierFormat.parse(name).key_bits < 4:
        raise PolicyError(f"format={name}: keys of fewer than 4 bits destroy a model, lower the budget instead")


def format_of(name: str, dense: str) -> TierFormat:
    """The format that a setting means; `dense` is the model's own."""
    return TierFormat.parse(dense if name == "dense" else name)


def rank(score: Tensor) -> Tensor:
    """Place of each score along the last dimension, 0 = largest, the first of equals before the others: int64."""
    best_first = score.argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(score.shape[-1], device=score.device).expand(score.shape)
    return torch.empty_like(best_first).scatter_(-1, best_first, place)


def best(score: Tensor, exempt: Tensor, count: int | Tensor) -> Tensor:
    """Bool `[R, H, n]`: the `count` best tokens of each head by `score` `[R, H, n]` that are not `exempt` (bool,
    broadcast). count: a number, or int64 `[R, H]`.
    """
    place = rank(score.masked_fill(exempt, -torch.inf))
    most = count[..., None] if isinstance(count, Tensor) else count
    return (place < most) & ~exempt


def tiers_of(keep: Tensor) -> Tensor:
    """int8: the first tier for what stays, dropped for the rest."""
    return torch.where(keep, 0, DROPPED).to(torch.int8)


def keep_all(num_layers: int, num_kv_heads: int) -> DecodeRule:
    """The rule of a policy with one tier that keeps every token it decodes."""
    shape = (num_layers, num_kv_heads, 1)
    return DecodeRule(torch.zeros(shape), torch.full(shape, UNLIMITED))


@dataclass(frozen=True)
class PromptBudget(Policy):
    """Cuts a prompt to a budget once; every token after it is kept.

    ratio: share of the prompt's tokens that each head keeps on average. budget: tokens a head instead, 0 = by `ratio`.
    format: of the kept tokens beyond window and sinks, `dense` = the model's own.
    window, sinks: last and first tokens, which are always kept, at 16 bits, and count towards the budget.
    """

    name: ClassVar[str] = ""

    ratio: float = 0.25
    budget: int = 0
    format: str = "dense"
    window: int = 32
    sinks: int = 0

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        check_budget(self.ratio, self.budget)
        check_room(self.budget or self.window + self.sinks, self.window + self.sinks)
        check_format(self.format)

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(format_of(self.format, dense), scores=False, positions=False),)

    def beyond(self, length: int) -> int:
        """Tokens that heads keep of a prompt of `length` beyond window and sinks, mean over heads and layers."""
        total = self.budget or round(self.ratio * length)
        return max(0, min(total, length) - self.window - self.sinks)

    @abstractmethod
    def importance(self, prompt: PromptView) -> Tensor:
        """What each token is worth, fp32 `[R, H, n]`; larger is rather kept."""

    def counts(self, prompt: PromptView, score: Tensor) -> int | Tensor:
        """Tokens that each head keeps beyond window and sinks: a number, or int64 `[R, H]`."""
        return self.beyond(prompt.length)

    def classify(self, prompt: PromptView) -> Tensor:
        score = self.importance(prompt)
        return tiers_of(best(score, prompt.protected, self.counts(prompt, score)))

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        return keep_all(num_layers, num_kv_heads)


@dataclass(frozen=True)
class HeldBudget(Policy):
    """Holds a budget through prompt and decoding: once a head is full, the weakest of its tokens makes room.

    ratio: share of `length` tokens, or of the prompt's if that is longer. length: tokens of context that `ratio` is of,
        so that the budget is known when decoding starts. budget: tokens a head instead, 0 = by `ratio`.
    format: of the kept tokens beyond window and sinks, `dense` = the model's own.
    window, sinks: last and first tokens, which are always kept, at 16 bits, and count towards the budget.
    interval: positions between two updates of the scores that decide.
    """

    name: ClassVar[str] = ""

    ratio: float = 0.25
    budget: int = 0
    length: int = 2048
    format: str = "dense"
    window: int = 1
    sinks: int = 0
    interval: int = 1

    def __post_init__(self) -> None:
        self.check_amount()
        check_window(self.window, self.sinks)
        check_room(self.held(), self.window + self.sinks)
        check_format(self.format)
        check_whole("interval", self.interval, 1)

    def check_amount(self) -> None:
        """Raise PolicyError unless `held` can be told."""
        check_budget(self.ratio, self.budget)
        check_whole("length", self.length, 1)

    def held(self, length: int = 0) -> int:
        """Tokens that a head keeps of a prompt of `length`, or (0) while decoding."""
        return self.budget or round(self.ratio * max(length, self.length))

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(format_of(self.format, dense)),)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        shape = (num_layers, num_kv_heads, 1)
        cap = torch.full(shape, self.held() - self.window - self.sinks)
        return DecodeRule(torch.zeros(shape), cap, min(self.interval, self.window))
