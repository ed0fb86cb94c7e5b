"""A policy with 8-bit keys in some heads: those whose 4-bit keys lose too much."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import DROPPED, DecodeRule, Policy, Prices, PromptView, Sifted

PRECISE_BITS = 8


def with_precise_keys(fmt: TierFormat) -> TierFormat:
    """The format with keys of 8 bits where it has fewer: `k4v2` -> `k8v2`."""
    if fmt.dense or fmt.key_bits >= PRECISE_BITS:
        return fmt
    return TierFormat.parse(f"k{PRECISE_BITS}{fmt.name[fmt.name.index('v') :]}")


@dataclass(frozen=True)
class PreciseKeys(Policy):
    """`base`, but in `heads` ((layer, kv head) pairs) every tier keeps keys at 8 bits.

    Each head uses as many tiers as `base` has; the others are closed to it. Raises PolicyError for a policy that the
    engine itself looks into while decoding, which would not know these tiers.
    """

    name: ClassVar[str] = "precise"

    base: Policy
    heads: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.base.query_rows or self.base.skips:
            raise PolicyError(f"{self.base.name} cannot mix formats by head: leave precise_keys empty")
        object.__setattr__(self, "heads", tuple(sorted({(int(layer), int(head)) for layer, head in self.heads})))
        object.__setattr__(self, "window", self.base.window)
        object.__setattr__(self, "sinks", self.base.sinks)

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return self._merged(dense)[0]

    def _merged(self, dense: str = "bf16") -> tuple[tuple[Tier, ...], list[int], list[int]]:
        """All tiers, most precise first, and where the base's are among them: as they are, and with precise keys."""
        plain = self.base.tiers(dense)
        precise = [replace(tier, format=with_precise_keys(tier.format)) for tier in plain]
        by_format = {tier.format: tier for tier in (*precise, *plain)}
        ordered = sorted(by_format.values(), key=lambda tier: tier.format.precision, reverse=True)
        place = {tier.format: index for index, tier in enumerate(ordered)}
        return tuple(ordered), [place[t.format] for t in plain], [place[t.format] for t in precise]

    def _places(self, num_heads: int, layer: int) -> tuple[Tensor, int]:
        """int64 `[H, t]`: the tier that each head of a layer uses for each of the base's; and how many there are."""
        merged, plain, precise = self._merged()
        place = torch.tensor(plain).repeat(num_heads, 1)
        for own, head in self.heads:
            if own == layer:
                place[head] = torch.tensor(precise)
        return place, len(merged)

    def rows(self, length: int) -> tuple[Tensor, Tensor] | None:
        return self.base.rows(length)

    def classify(self, prompt: PromptView) -> Tensor:
        return self._placed(self.base.classify(prompt), prompt)

    def sift(self, prompt: PromptView, prices: Prices) -> Sifted:
        place, count = self._places(prompt.score.shape[1], prompt.layer)
        mean = torch.tensor(prices.token, dtype=torch.float64)[place].mean(0)
        found = self.base.sift(prompt, replace(prices, token=tuple(mean.tolist())))
        share = found.share
        if share is not None:
            at = place.to(share.device).expand(share.shape)
            share = share.new_zeros(*share.shape[:-1], count).scatter_(-1, at, share)
        return Sifted(self._placed(found.tier, prompt), found.score, share)

    def _placed(self, tier: Tensor, prompt: PromptView) -> Tensor:
        """tier: int8 `[R, H, n]` of the base."""
        place, _ = self._places(tier.shape[1], prompt.layer)
        place = torch.cat([place, torch.full((len(place), 1), DROPPED)], 1).to(tier.device, torch.int8)  # [H, t + 1]
        at = torch.where(tier < 0, place.shape[1] - 1, tier).long()
        return place.expand(tier.shape[0], -1, -1).gather(-1, at)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        if any(layer >= num_layers or head >= num_kv_heads for layer, head in self.heads):
            raise PolicyError(f"precise_keys names heads that a model of {num_layers} x {num_kv_heads} does not have")
        own = self.base.decode_rule(num_layers, num_kv_heads)
        places = [self._places(num_kv_heads, layer) for layer in range(num_layers)]
        place = torch.stack([place for place, _ in places])  # [L, H, t]
        shape = (num_layers, num_kv_heads, places[0][1])
        alpha = own.alpha.new_zeros(shape).scatter_(-1, place, own.alpha)
        return replace(own, alpha=alpha, cap=own.cap.new_zeros(shape).scatter_(-1, place, own.cap))

    def check_context(self, max_len: int) -> None:
        self.base.check_context(max_len)

    def describe(self) -> str:
        return f"{self.base.describe()} with {PRECISE_BITS}-bit keys in {len(self.heads)} heads"
