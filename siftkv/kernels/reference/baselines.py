"""Records of the two formats that only baselines use: keys by channel (`k2v2t`) and outliers apart (`k4v4o1`).

Both quantise between minimum and maximum, to the nearest code, whatever the bits: `x ~ code * scale + zero`, scale and
zero-point in fp16.

By channel (KIVI, arXiv 2402.02750): 32 tokens that stand side by side in their tier share a scale a channel of keys;
values have one a token for 32 channels. The 32 records of a group hold its `D` scales and zero-points, `D / 32` each,
so tokens must come and go 32 at a time.

Outliers apart (QAQ, arXiv 2403.04643, its code's head level): the lowest and highest channels of a vector are kept in
fp16 beside their channel, and the range is that of the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.formats import CHANNEL_GROUP, PageLayout, TierFormat
from siftkv.kernels.reference.fit import nearest_codes

_FP16_MAX = 65504.0


def _half(x: Tensor) -> Tensor:
    """fp32 `x` as fp16 keeps it."""
    return x.clamp(-_FP16_MAX, _FP16_MAX).half().float()


def _coded(x: Tensor, low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[..., n]` of `x` between `low` and `high` `[...]`, and fp32 `[..., 2]`: scale and zero-point."""
    zero, scale = _half(low), _half((high - low) / (2**bits - 1))
    codes = nearest_codes(x, zero[..., None], scale[..., None], 2**bits - 1)
    return codes.to(torch.uint8), torch.stack([scale, zero], -1)


def _valued(codes: Tensor, meta: Tensor) -> Tensor:
    return codes.float() * meta[..., :1] + meta[..., 1:2]


def _by_channel(k: Tensor) -> Tensor:
    """`[..., T, D]` as `[..., T / 32, D, 32]`."""
    *lead, tokens, dim = k.shape
    assert tokens % CHANNEL_GROUP == 0, "tokens of a tier by channel come 32 at a time"
    return k.reshape(*lead, tokens // CHANNEL_GROUP, CHANNEL_GROUP, dim).transpose(-1, -2)


def _by_token(grouped: Tensor) -> Tensor:
    """Inverse of `_by_channel`."""
    *lead, groups, dim, _ = grouped.shape
    return grouped.transpose(-1, -2).reshape(*lead, groups * CHANNEL_GROUP, dim)


def quantise_by_channel(k: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys fp32 `[..., T, D]`, T a multiple of 32, to codes uint8 `[..., T, D]` and fp32 `[..., T, D / 32, 2]`: scales
    and zero-points of the tokens' groups, shared out among their records.
    """
    grouped = _by_channel(k)
    codes, meta = _coded(grouped, grouped.amin(-1), grouped.amax(-1), bits)
    return _by_token(codes), meta.reshape(*k.shape[:-1], k.shape[-1] // CHANNEL_GROUP, 2)


def keys_by_channel(codes: Tensor, meta: Tensor) -> Tensor:
    """Inverse of `quantise_by_channel`: fp32 `[..., T, D]`."""
    *lead, tokens, dim = codes.shape
    return _by_token(_valued(_by_channel(codes), meta.reshape(*lead, tokens // CHANNEL_GROUP, dim, 2)))


def quantise_in_groups(v: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Values fp32 `[..., D]` to codes uint8 `[..., D]` and fp32 `[..., D / 32, 2]`: one range for 32 channels."""
    grouped = v.unflatten(-1, (v.shape[-1] // CHANNEL_GROUP, CHANNEL_GROUP))
    codes, meta = _coded(grouped, grouped.amin(-1), grouped.amax(-1), bits)
    return codes.flatten(-2), meta


def values_in_groups(codes: Tensor, meta: Tensor) -> Tensor:
    """Inverse of `quantise_in_groups`."""
    return _valued(codes.unflatten(-1, (codes.shape[-1] // CHANNEL_GROUP, CHANNEL_GROUP)), meta).flatten(-2)


def quantise_beside_outliers(x: Tensor, bits: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors fp32 `[..., D]` without their `count` lowest and highest channels: codes uint8 `[..., D]`, scale and
    zero-point fp32 `[..., 1, 2]`, and the channels left out, int64 `[..., 2 count]`.
    """
    rising, order = x.sort(dim=-1, stable=True)
    low, high = rising[..., count], rising[..., x.shape[-1] - 1 - count]
    codes, meta = _coded(x, low, high, bits)
    return codes, meta[..., None, :], torch.cat([order[..., :count], order[..., -count:]], -1)


def encode(fmt: TierFormat, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 `[..., D]` (not packed) and metadata uint8 `[..., m]` of keys or values fp32 `[..., D]`."""
    bits = fmt.key_bits if keys else fmt.value_bits
    if fmt.outliers:
        codes, meta, channel = quantise_beside_outliers(x, bits, fmt.outliers)
        apart = _half(x.gather(-1, channel)).half()
        return codes, torch.cat([_bytes(meta.flatten(-2).half()), _bytes(apart), channel.to(torch.uint8)], -1)
    codes, meta = quantise_by_channel(x, bits) if keys else quantise_in_groups(x, bits)
    return codes, _bytes(meta.flatten(-2).half())


def decode(layout: PageLayout, codes: Tensor, meta: Tensor, keys: bool) -> Tensor:
    """Inverse of `encode`: fp32 `[..., D]`."""
    count = layout.format.outliers
    if not count:
        pairs = _halves(meta).unflatten(-1, (meta.shape[-1] // 4, 2))
        return keys_by_channel(codes, pairs) if keys else values_in_groups(codes, pairs)
    head, apart, channel = meta.split([4, 4 * count, 2 * count], -1)
    at = channel.long().clamp_max(layout.head_dim - 1)  # where no token stands there may be any bytes
    return _valued(codes, _halves(head)).scatter(-1, at, _halves(apart))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _halves(raw: Tensor) -> Tensor:
    return raw.clone(memory_format=torch.contiguous_format).view(torch.float16).float()
