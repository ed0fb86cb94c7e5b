"""A warning when a model's keys are about to be quantised in a way that they are known not to bear."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from siftkv.formats import Tier
from siftkv.models import LoadedModel

_log = logging.getLogger(__name__)
_FRAGILE_BITS = 4
_OUTLYING = 3.0
"""Strength of a rotary pair's bias by the typical spread of the head's keys, from which it must go before keys are
quantised: then it takes up most of a quantiser's range."""

_said: set[tuple[str, str]] = set()


def warn_of_fragile_keys(model: LoadedModel, mode: str, tiers: Iterable[Tier]) -> None:
    """Log one warning a model and mode where keys carry a large bias, a tier keeps keys at 4 bits or fewer, and
    conditioning was turned down to `bias` or `none`.

    mode: of `siftkv.engine.conditioning`. tiers: that keys may go to.
    """
    if mode == "full" or all(t.format.dense or t.format.key_bits > _FRAGILE_BITS for t in tiers):
        return
    strength = bias_strength(model)
    layers = (strength.amax(-1) > _OUTLYING).nonzero()[:, 0].tolist()
    if not layers or (model.name, mode) in _said:
        return
    _said.add((model.name, mode))
    _log.warning(
        "%s: its keys carry a bias of up to %.0f times their spread (%d of %d layers, such as %d), and "
        "conditioning=%r %s: use conditioning='full', or 8-bit keys",
        model.name,
        float(strength.max()),
        len(layers),
        len(strength),
        int(strength.amax(-1).argmax()),
        mode,
        _CONSEQUENCE[mode],
    )


_CONSEQUENCE = {
    "none": "lets 4-bit keys spend their levels on it, which destroys answers",
    "bias": "removes that alone, not what else keys have in common, so 4-bit keys lose more than they must",
}


def bias_strength(model: LoadedModel) -> Tensor:
    """fp32 `[L, H]`: the bias of each head's largest rotary pair by the typical spread of its keys, from the weights;
    zeros where keys have none.
    """
    decoder, found = model.decoder, []
    for layer in range(model.config.num_layers):
        spread = decoder.key_spread(layer).cpu()
        bias = decoder.key_bias(layer)
        low, high = (torch.zeros_like(spread) if bias is None else bias.cpu()).chunk(2, -1)
        typical = spread.square().mean(-1).sqrt() * 2**0.5
        found.append((low.square() + high.square()).sqrt().amax(-1) / typical.clamp_min(1e-12))
    return torch.stack(found)
