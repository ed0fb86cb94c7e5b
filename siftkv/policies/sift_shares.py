"""How a layer's budget is shared out among its heads' tiers: the arithmetic of `sift`, on a few numbers a head.

`share_out` in `siftkv/kernels/cuda/src/worth.cu` is the same for a GPU, in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from siftkv.kernels.ranking import ALMOST, LEVELS, SCALES, SOON, TierSizes
from siftkv.policies.base import DROPPED


@dataclass(frozen=True)
class Room:
    """What `R` prompts may take in a layer, fp32 `[R, 1, 1]` each.

    budget: bytes of all heads. pages: of all heads. middle: tokens that leave the window. growth: how much larger a
    share becomes than what is held, by the prompt's length. each: one token, by the length. weight: of the layer.
    whole: 1 where whole pages are filled, else 0. unknown: 1 where prompts are too short to tell heads apart.
    """

    budget: Tensor
    pages: Tensor
    middle: Tensor
    growth: Tensor
    each: Tensor
    weight: Tensor
    whole: Tensor
    unknown: Tensor


def shares(above: Tensor, sizes: TierSizes, room: Room) -> tuple[Tensor, Tensor]:
    """How many tokens of each head are in each tier or a better one, and how large a share of the tokens that the
    request has seen each tier may hold later: fp32 `[R, H, 3]` both. Of its pages the last tier leaves `sizes.ahead`
    tokens to what comes next.

    above: fp32 `[R, H, W]`, see `siftkv.kernels.ranking.at_or_above`.
    """
    a_page, even = (_constant(above.device, *values) for values in (sizes.a_page, sizes.even))
    ahead = room.whole * sizes.ahead * _constant(above.device, 0.0, 0.0, 1.0)
    held = _wanted(above, sizes, room.budget - above.shape[1] * sizes.step[-1] * ahead[..., -1:]) + ahead
    grown, pages = _opened(held / a_page, room.pages)
    grown = torch.maximum(grown * a_page, (pages - 1) * a_page + 1)  # what a tier has opened it may fill
    grown = (grown - 0.5).clamp_min(0.0) * room.each  # half a token less, lest rounding open a page
    share = torch.where(room.whole > 0, grown, held * room.growth)
    share = torch.where(room.unknown > 0, even * room.weight, share)
    held = torch.where(room.whole > 0, (pages * a_page - ahead).clamp_min(0.0), held)
    return held.cumsum(-1).minimum(room.middle), share


def _wanted(above: Tensor, sizes: TierSizes, budget: Tensor) -> Tensor:
    """How many tokens of each head are in each tier where all heads of a layer share one scale: whole numbers, fp32
    `[R, H, 3]`.

    The scale is set where the budget is spent; within one of its levels tokens are taken to be evenly spread.
    """
    total = above.sum(1)
    columns = [total[:, shift : shift + LEVELS] * step for shift, step in zip(sizes.shift, sizes.step, strict=True)]
    cost = torch.stack(columns).sum(0)
    fits = (cost > budget[:, 0]).sum(-1, keepdim=True)  # [R, 1]: the first level that the budget has room for
    level = torch.cat([fits, fits - 1], -1).clamp_(0, LEVELS - 1)  # [R, 2]
    least, most = cost.gather(1, level)[..., None, None].unbind(1)
    spread = ((budget - least) / (most - least).clamp_min(ALMOST)).clamp_(0.0, 1.0)
    shifts = _constant(above.device, *sizes.shift).long()
    bars = (level[:, None, :, None] + shifts).flatten(2).expand(-1, above.shape[1], -1)
    least, most = above.gather(-1, bars).unflatten(-1, (2, -1)).unbind(2)
    within = torch.lerp(least, most, spread).floor_()
    return torch.cat([within[..., :1], within.diff(dim=-1)], -1)


def _opened(wanted: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's `total` pages `[R, 1, 1]` among its heads' tiers, fp32 `[R, H, t]` each: `(grown, pages)`.

    grown: pages that tiers would have if pages could be split, in proportion to `wanted`. pages: the same, each rounded
    up, which adds up to `total`; what rounding leaves over goes to whom most is missing. A tier that holds `grown *
    a_page` tokens by now, and as many more as the request grows, needs its next page once `grown` passes `pages`: at
    another time in each, so that together they hardly run ahead of the request; those that are due soon are paid for.
    """
    wanted = wanted * (total / wanted.sum((1, 2), keepdim=True).clamp_min(ALMOST))
    scale = torch.linspace(0, 1, SCALES + 1, device=wanted.device)
    least = _constant(wanted.device, 0.0, 0.0, 1.0)  # no head is left with nothing
    fits = torch.ones_like(total[..., 0], dtype=torch.bool)  # [R, S]
    for later in (1.0, SOON):
        pages = (wanted[:, None] * (scale * later)[:, None, None]).ceil_().maximum(least).sum((2, 3))
        fits = fits & (pages <= total[..., 0] * later)
    fits = (fits.sum(-1) - 1).clamp_min_(0)[:, None, None]
    grown = wanted * scale[fits]
    pages = _pages(wanted, grown.ceil().maximum(least), total)
    return torch.where(fits > 0, grown, torch.minimum(wanted, pages)), pages


def _pages(wanted: Tensor, least: Tensor, total: Tensor) -> Tensor:
    """A layer's `total` pages `[R, 1, 1]`, shared out among its heads' tiers as they ask for them, none below `least`.

    All fp32 `[R, H, t]`, the result in whole numbers. Fractions go to whom most is missing of a page.
    """
    pages, held, total = wanted.flatten(1), least.flatten(1), total[..., 0]
    more, free = (pages - held).clamp_min(0.0), total - held.sum(-1, keepdim=True)
    more = more * (free / more.sum(-1, keepdim=True).clamp_min(ALMOST)).clamp(0.0, 1.0)
    full = (more + ALMOST).floor()
    turn = (more - full).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (held + full + (turn < free - full.sum(-1, keepdim=True))).view(wanted.shape)


def by_rank(worth: Tensor, bounds: Tensor) -> Tensor:
    """Tier int8 `[R, H, n]` of tokens of that worth: the first whose bound `[R, H, t]` is above their rank."""
    order = worth.argsort(dim=-1, descending=True, stable=True)
    position = torch.arange(order.shape[-1], device=order.device)
    tier = (position[:, None] >= bounds[:, :, None]).sum(-1).to(torch.int8)
    tier.masked_fill_(tier == bounds.shape[-1], DROPPED)
    return torch.empty_like(tier).scatter_(-1, order, tier)


@lru_cache(maxsize=64)
def _constant(device: torch.device, *values: float) -> Tensor:
    """fp32 `[len(values)]`, copied once."""
    return to_device(torch.tensor(values, dtype=torch.float32), device)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that a GPU's host does not wait for."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)
