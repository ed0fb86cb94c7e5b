"""Key conditioning: what is subtracted from keys and how they are turned before they are quantised.

A projection bias on keys (Qwen2.x) puts a constant into a few channels that is tens of times larger than what varies;
min/max quantisation then spends its levels on the constant. So `k' = (k - RoPE_p(b_r)) @ rotation` is stored, and
attention adds `q . RoPE_p(b_r)` back exactly (see `siftkv.kernels.reference.condition`). `b_r` is the bias on the
head's `r` largest rotary pairs: the energy sits in few, slow pairs, and pairs whose bias is small against the spread of
the keys need no cure. The rotation is a signed Hadamard transform, as in QuaRot (arXiv 2404.00456), which spreads
outliers over channels. It costs no bytes and needs no calibration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from siftkv.errors import SiftKVError
from siftkv.kernels.state import Conditioning

MODES = ("full", "bias", "none")
"""`full`: bias removed and keys rotated; `bias`: bias removed only; `none`: keys are quantised as they are."""

_RANK_STEP = 8
_ORDINARY = 0.5
"""A pair's bias may stay when it is below this share of the head's typical key spread."""


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
    """Rotary pairs (int64, largest first) of one head's bias `[D]` that must be removed, given its key spread `[D]`."""
    half = bias.shape[0] // 2
    strength = (bias[:half].square() + bias[half:].square()).sqrt()
    ordinary = _ORDINARY * float(spread.square().mean().sqrt()) * 2**0.5
    order = strength.argsort(descending=True)
    above = int((strength > ordinary).sum())
    return order[: min(half, -(-above // _RANK_STEP) * _RANK_STEP)]


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

    cos, sin: rotary tables fp32 `[max_len, D/2]`. biases, spreads: a layer each, key bias `[H, D]` or None, and the
        standard deviation of key channels `[H, D]`. Raises SiftKVError for an unknown mode.
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
    return Conditioning(
        rotation=(hadamard(head_dim) if rotates else torch.eye(head_dim)).to(device),
        cos=cos.float(),
        sin=sin.float(),
        bias=bias.to(device),
        pairs=pairs.to(device),
        rank=rank.to(device),
        has_bias=bool((rank > 0).any()),
        rotates=rotates,
    )
