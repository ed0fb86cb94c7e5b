"""Key conditioning: what is subtracted from keys and how they are turned before they are quantised.

Before their rotation by position, most of the energy of keys is a constant: 75 to 80 % in models without a bias, more
where a projection bias (Qwen2.x) makes it tens of times larger than what varies. Min/max quantisation would spend its
levels on it. So `k' = (k - RoPE_p(b_r)) @ rotation` is stored, where `b` is the constant (the keys' mean, or the bias
where nothing was measured), and attention adds `q . RoPE_p(b_r)` back exactly, whatever `b` is (see
`siftkv.kernels.reference.condition`). `b_r` is `b` on the head's `r` largest rotary pairs, in which most of it sits:
each pair costs work in attention. The rotation is a signed Hadamard transform, as in QuaRot (arXiv 2404.00456), which
spreads outliers over channels. It costs no bytes beyond positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from siftkv.errors import SiftKVError
from siftkv.kernels.state import Conditioning
from siftkv.kernels.turns import exact_turns, turn_rates

MODES = ("full", "bias", "none")
"""`full`: bias removed and keys rotated; `bias`: bias removed only; `none`: keys are quantised as they are."""

_RANK_STEP = 8
_ORDINARY, _OUTLYING = 0.5, 3.0
"""Strengths of a pair by the head's typical key spread: below the first its constant may stay, above the second it must
go.
"""

MOST_PAIRS = 16
"""Pairs a head that are removed though they are no outliers. Of the energy of SmolLM2's keys 36 % stay at 8, 27 % at 16
and 23 % at 32, which are all.
"""


def hadamard(dim: int) -> Tensor:
    """Signed block Hadamard transform, orthogonal fp32 `[dim, dim]`; blocks are the largest power of two that divides
    `dim`.
    """
    block = dim & -dim
    h = torch.ones(1, 1)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(0x51F7)).float() * 2 - 1
    return signs[:, None] * torch.block_diag(*[h / block**0.5] * (dim // block))


def _kept_pairs(bias: Tensor, spread: Tensor) -> Tensor:
    """Rotary pairs (int64, largest first) of one head's constant `[D]` that are removed, given its key spread `[D]`."""
    half = bias.shape[0] // 2
    strength = (bias[:half].square() + bias[half:].square()).sqrt()
    typical = float(spread.square().mean().sqrt()) * 2**0.5
    worth, outlying = (int((strength > share * typical).sum()) for share in (_ORDINARY, _OUTLYING))
    count = max(outlying, min(worth, MOST_PAIRS))
    return strength.argsort(descending=True)[: min(half, -(-count // _RANK_STEP) * _RANK_STEP)]


def build_conditioning(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    biases: Sequence[Tensor | None],
    spreads: Sequence[Tensor],
    mode: str = "full",
) -> Conditioning:
    """Conditioning of a model's keys.

    cos, sin: rotary tables fp32 `[max_len, D/2]`. biases, spreads: a layer each, what keys have in common before
        rotation `[H, D]` or None, and the standard deviation of key channels `[H, D]`. Raises SiftKVError for an
        unknown mode.
    """
    if mode not in MODES:
        raise SiftKVError(f"unknown conditioning {mode!r}: use {', '.join(MODES)}")
    bias = torch.zeros(num_layers, num_kv_heads, head_dim)
    rank = torch.zeros(num_layers, num_kv_heads, dtype=torch.int32)
    kept: dict[tuple[int, int], Tensor] = {}
    if mode != "none":
        for layer, (layer_bias, spread) in enumerate(zip(biases, spreads, strict=True)):
            for head in range(num_kv_heads) if layer_bias is not None else ():
                pairs = _kept_pairs(layer_bias[head].float().cpu(), spread[head].float().cpu())  # type: ignore[index]
                channels = torch.cat([pairs, pairs + head_dim // 2])
                bias[layer, head, channels] = layer_bias[head].float().cpu()[channels]  # type: ignore[index]
                kept[layer, head], rank[layer, head] = pairs, len(pairs)
    pairs = torch.zeros(num_layers, num_kv_heads, max(1, int(rank.max())), dtype=torch.int32)
    for (layer, head), value in kept.items():
        pairs[layer, head, : len(value)] = value.to(torch.int32)
    device = cos.device
    rotates = mode == "full"
    rates = turn_rates(cos, sin) if kept else None
    if rates is not None:
        cos, sin = exact_turns(rates, float(cos[0].mean()), cos.shape[0])
    return Conditioning(
        rotation=(hadamard(head_dim) if rotates else torch.eye(head_dim)).to(device),
        cos=cos.float(),
        sin=sin.float(),
        bias=bias.to(device),
        pairs=pairs.to(device),
        rank=rank.to(device),
        has_bias=bool((rank > 0).any()),
        rotates=rotates,
        rates=rates,
    )
