"""Quantise tokens to page records and back: the readable reference, vectorised over any leading dimensions.

Asymmetric quantisation per token and sub-group, after RoPE: between minimum and maximum (DiffKV, section 4.1), with
one or two bits to fitted levels (`siftkv.kernels.reference.fit`). Scale and zero-point are stored in fp16 and codes are
computed against the *stored* values, but for fitted ones. The zero-point is rounded down and the scale up, so that
codes of more than two bits clip no value: the error is at most half a stored scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.formats import PLAIN_DTYPES, VOTE_BYTES, WEIGHT_BYTES, PageLayout, TierFormat
from siftkv.kernels.reference import baselines
from siftkv.kernels.reference.fit import FITTED_BITS, Levels, levels_of, nearest_codes

SCORE_SCALE = 2.0**15
"""Scores (mean attention, 0 to 1) are stored in fp16 times this, so that means down to 2e-9 keep full precision."""

_FP16_MAX = 65504.0
_HALF_MAX_BITS = 0x7BFF
_E5M3_MAX_BITS = 0xF7


def half_bits_toward_zero(x: Tensor) -> Tensor:
    """fp16 bit patterns (int32) of non-negative fp32 `x`, rounded towards zero, saturating at 65504; below the smallest
    normal number, 2^-14, to the nearest.
    """
    bits = (x * 2.0**-112).view(torch.int32) >> 13
    return bits.clamp_max(_HALF_MAX_BITS)


def half_from_bits(bits: Tensor) -> Tensor:
    """fp32 values of non-negative fp16 bit patterns (int32)."""
    return (bits.to(torch.int32) << 13).view(torch.float32) * 2.0**112


def half_up(x: Tensor) -> Tensor:
    """Bit pattern (int32) of the smallest fp16 number that is at least the non-negative fp32 `x`, at most 65504."""
    bits = half_bits_toward_zero(x)
    return (bits + (half_from_bits(bits) < x)).clamp_max(_HALF_MAX_BITS)


def half_down_signed(x: Tensor) -> Tensor:
    """The largest fp16 number that is at most fp32 `x`, as fp32 (magnitude saturates at 65504)."""
    magnitude = x.abs()
    bits = torch.where(x < 0, half_up(magnitude), half_bits_toward_zero(magnitude))
    return torch.where(x < 0, -half_from_bits(bits), half_from_bits(bits))


def _codes(grouped: Tensor, levels: Levels, zero: Tensor, scale: Tensor, qmax: int) -> Tensor:
    nearest = nearest_codes(grouped, zero[..., None], scale[..., None], qmax)
    return torch.where(levels.fitted[..., None], levels.codes, nearest).to(torch.uint8).flatten(-2)


def quantise_groups(x: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and fp16 metadata of `x` `[..., D]` fp32: codes uint8 `[..., D]`, scale and zero fp32 `[..., groups]`
    (fp16-exact).

    A range wider than fp16 can scale (one-bit codes of +-65504) is centred, so that the error is still half the range
    at most.
    """
    qmax = 2**bits - 1
    grouped = x.unflatten(-1, (groups, -1))
    levels = levels_of(grouped, bits)
    low, high = levels.low, levels.high
    excess = ((high - low) - _FP16_MAX * qmax).clamp_min(0.0)
    zero = half_down_signed(low + excess / 2)
    scale = half_from_bits(half_up((high - zero).clamp_min(0.0) / qmax))
    return _codes(grouped, levels, zero, scale, qmax), scale, zero


def compact_meta(levels: Levels, bits: int) -> tuple[Tensor, Tensor]:
    """One-byte scale and centre of each group: `(scale_byte, centre_byte)`, both uint8 `[..., groups]`.

    The scale is an unsigned fp8 (5 exponent, 3 mantissa bits: the upper half of an fp16), rounded up so that nothing is
    clipped, or to the nearest where ranges are fitted. The centre of the range counts in units of `scale * qmax / 254`,
    so that every range that contains zero can be named.
    """
    qmax = 2**bits - 1
    low, high = levels.low.clamp_max(0.0), levels.high.clamp_min(0.0)
    rounding = 127 if bits > FITTED_BITS else 64
    scale_byte = ((half_up((high - low) / qmax) + rounding) >> 7).clamp_max(_E5M3_MAX_BITS)
    unit = half_from_bits(scale_byte << 7) * (qmax / 254)
    centre = torch.where(unit > 0, (low + high) / 2 / torch.where(unit > 0, unit, 1.0), torch.zeros(()))
    centre_byte = centre.round().clamp(-127, 127).to(torch.int32) & 0xFF
    return scale_byte.to(torch.uint8), centre_byte.to(torch.uint8)


def expand_compact(scale_byte: Tensor, centre_byte: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """fp32 `(scale, zero)` of compact metadata, with `value = scale * code + zero`."""
    qmax = 2**bits - 1
    scale = half_from_bits(scale_byte.to(torch.int32) << 7)
    centre = centre_byte.view(torch.int8).to(torch.float32)
    return scale, scale * (centre * (qmax / 254) - qmax / 2)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Planar packing: uint8 codes `[..., D]` to bytes `[..., D * bits / 8]`; plane `i` fills bits `[i*bits,
    (i+1)*bits)`.
    """
    planes = codes.unflatten(-1, (8 // bits, -1))
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (planes << shift[:, None]).sum(-2, dtype=torch.int32).to(torch.uint8)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_planes`."""
    shift = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None, :] >> shift[:, None]) & (2**bits - 1)).flatten(-2)


def _as_bytes(x: Tensor) -> Tensor:
    """Bytes of the last dimension, little-endian: `[..., n]` of an `s`-byte type to uint8 `[..., n * s]`."""
    return x.contiguous().view(torch.uint8)


def _encode_half(x: Tensor, bits: int, groups: int) -> tuple[Tensor, Tensor]:
    codes, scale, zero = quantise_groups(x, bits, groups)
    return pack_planes(codes, bits), _as_bytes(torch.stack([scale, zero], -1).flatten(-2).half())


def _encode_values(v: Tensor, fmt: TierFormat) -> tuple[Tensor, Tensor]:
    if not fmt.compact:
        return _encode_half(v, fmt.value_bits, fmt.value_groups)
    grouped = v.unflatten(-1, (fmt.value_groups, -1))
    levels = levels_of(grouped, fmt.value_bits)
    scale_byte, centre_byte = compact_meta(levels, fmt.value_bits)
    scale, zero = expand_compact(scale_byte, centre_byte, fmt.value_bits)
    codes = _codes(grouped, levels, zero, scale, 2**fmt.value_bits - 1)
    return pack_planes(codes, fmt.value_bits), torch.stack([scale_byte, centre_byte], -1).flatten(-2)


def score_bits(score: Tensor) -> Tensor:
    """Stored form (int32 in 16 bits) of mean-attention scores fp32, rounded to nearest even."""
    x = score.clamp(0.0, 1.0) * SCORE_SCALE
    bits = (x * 2.0**-112).view(torch.int32)
    return (bits + 0xFFF + ((bits >> 13) & 1)) >> 13


def score_from_bits(bits: Tensor) -> Tensor:
    """Mean attention (fp32, 0 to 1) of a stored score (any integer type, 16 significant bits)."""
    return half_from_bits(bits.to(torch.int32) & 0xFFFF) / SCORE_SCALE


MOST_VOTES = 0xFFFF
"""Where a token's count of votes stops."""


def encode(
    layout: PageLayout,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    position: Tensor,
    votes: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Records of tokens: k, v fp32 `[..., D]`, score fp32 `[...]`, position int64 `[...]` to uint8 `[...,
    token_bytes]`.

    `k` is what the tier stores: plain keys or, in most quantised tiers, conditioned ones. votes: integer, weight: fp32
    `[...]`, None = zeros; a tier keeps those that it has room for. The last dimension of tokens of a format by channel
    is cut into groups (`siftkv.kernels.reference.baselines`).
    """
    fmt = layout.format
    if fmt.dense:
        parts = [_as_bytes(_saturated(x, PLAIN_DTYPES[fmt.name])) for x in (k, v)]
    elif fmt.plain:
        (key, key_meta), (value, value_meta) = baselines.encode(fmt, k, True), baselines.encode(fmt, v, False)
        parts = [pack_planes(key, fmt.key_bits), key_meta, pack_planes(value, fmt.value_bits), value_meta]
    else:
        parts = [*_encode_half(k, fmt.key_bits, fmt.key_groups), *_encode_values(v, fmt)]
    if layout.tier.scores:
        parts.append(_as_bytes(score_bits(score).to(torch.int16)[..., None]))
    if layout.tier.positions:
        parts.append(_as_bytes(position.to(torch.int32)[..., None]))
    if layout.tier.votes:
        votes = torch.zeros_like(position) if votes is None else votes
        parts.append(_as_bytes(votes.clamp(0, MOST_VOTES).to(torch.int32).to(torch.int16)[..., None]))
    if layout.tier.weights:
        weight = torch.zeros_like(score, dtype=torch.float32) if weight is None else weight
        parts.append(_as_bytes(weight.float()[..., None]))
    return torch.cat(parts, -1)


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In 8 bits a number out of range becomes the largest that there is; PyTorch alone would make it NaN."""
    if dtype.itemsize == 1:
        x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return x.to(dtype)


def _reinterpret(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 `[..., n * s]` as `[..., n]` of an `s`-byte type; a copy, since slices of records are not aligned."""
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)


def _apply_meta(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    grouped = codes.unflatten(-1, (scale.shape[-1], -1)).float()
    return (grouped * scale[..., None] + zero[..., None]).flatten(-2)


def decode(layout: PageLayout, record: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inverse of `encode`: `(k, v, score, position)`; score and position are zero where a tier stores none."""
    fmt = layout.format
    sizes = [layout.key_row, layout.key_meta_bytes, layout.value_row, layout.value_meta_bytes]
    rest = layout.token_bytes - sum(sizes)
    key, key_meta, value, value_meta, state = record.split([*sizes, rest], -1)
    if fmt.dense:
        dtype = PLAIN_DTYPES[fmt.name]
        k, v = _reinterpret(key, dtype).float(), _reinterpret(value, dtype).float()
    elif fmt.plain:
        k = baselines.decode(layout, unpack_planes(key, fmt.key_bits), key_meta, keys=True)
        v = baselines.decode(layout, unpack_planes(value, fmt.value_bits), value_meta, keys=False)
    else:
        scale, zero = _reinterpret(key_meta, torch.float16).float().unflatten(-1, (-1, 2)).unbind(-1)
        k = _apply_meta(unpack_planes(key, fmt.key_bits), scale, zero)
        if fmt.compact:
            scale_byte, centre_byte = value_meta.contiguous().unflatten(-1, (-1, 2)).unbind(-1)
            scale, zero = expand_compact(scale_byte, centre_byte, fmt.value_bits)
        else:
            scale, zero = _reinterpret(value_meta, torch.float16).float().unflatten(-1, (-1, 2)).unbind(-1)
        v = _apply_meta(unpack_planes(value, fmt.value_bits), scale, zero)
    score = torch.zeros(record.shape[:-1], device=record.device)
    position = torch.zeros(record.shape[:-1], dtype=torch.int64, device=record.device)
    if layout.tier.scores:
        score = score_from_bits(_reinterpret(state[..., :2], torch.int16)[..., 0])
        state = state[..., 2:]
    if layout.tier.positions:
        position = _reinterpret(state[..., :4], torch.int32)[..., 0].long()
    return k, v, score, position


def votes_and_weights(layout: PageLayout, record: Tensor) -> tuple[Tensor, Tensor]:
    """Votes int32 and log-weights fp32 `[...]` of records `[..., token_bytes]`; zeros where a tier keeps none."""
    votes = torch.zeros(record.shape[:-1], dtype=torch.int32, device=record.device)
    weight = torch.zeros(record.shape[:-1], device=record.device)
    end = layout.token_bytes
    if layout.tier.weights:
        weight = _reinterpret(record[..., end - WEIGHT_BYTES : end], torch.float32)[..., 0]
        end -= WEIGHT_BYTES
    if layout.tier.votes:
        votes = _reinterpret(record[..., end - VOTE_BYTES : end], torch.int16)[..., 0].to(torch.int32) & MOST_VOTES
    return votes, weight
