"""One token to a page record and back, to the bit as the reference does it: fp32 arithmetic, one IEEE operation at a
time.
"""

from __future__ import annotations

import numpy as np

from siftkv.kernels.numba.bits import (
    dense_bits,
    dense_value,
    half_down_signed,
    half_up,
    half_value,
    score_bits,
    score_from_bits,
)
from siftkv.kernels.numba.compile import inner
from siftkv.kernels.numba.fit import fit
from siftkv.kernels.numba.tiles import compact_pair
from siftkv.kernels.numba.vectors import (
    LANES,
    div16,
    lanes_max,
    lanes_min,
    load16,
    max16,
    min16,
    round16,
    splat16,
    store16,
    sub16,
)
from siftkv.kernels.numba.views import (
    COMPACT,
    FP32,
    KEY_AT,
    KEY_BITS,
    KEY_GROUPS,
    KEY_META_AT,
    KEY_ROW,
    KIND,
    PAGE_BYTES,
    POSITION_AT,
    POSITIONS,
    QUANTISED,
    SCORE_AT,
    SCORES,
    TOKENS,
    VALUE_AT,
    VALUE_BITS,
    VALUE_GROUPS,
    VALUE_META_AT,
    VALUE_ROW,
    VOTE_AT,
    VOTES,
    WEIGHT_AT,
    WEIGHTS,
)
from siftkv.kernels.reference.fit import FITTED_BITS

_FP16_MAX = np.float32(65504.0)
_E5M3_MAX_BITS = 0xF7


@inner
def value_range(x, low, high):
    """Smallest and largest of `x[low:high]`."""
    whole = low + (high - low) // LANES * LANES
    smallest = largest = x[low]
    if whole > low:
        least = most = load16(x, low)
        for c in range(low + LANES, whole, LANES):
            here = load16(x, c)
            least, most = min16(least, here), max16(most, here)
        smallest, largest = lanes_min(least), lanes_max(most)
    for c in range(whole, high):
        smallest, largest = min(smallest, x[c]), max(largest, x[c])
    return smallest, largest


@inner
def codes_of(x, codes, low, high, zero, scale, qmax):
    """`round((x - zero) / scale)` within `[0, qmax]` as fp32 to `codes`, which has a vector's room behind `high`."""
    if not scale > 0:
        for c in range(low, high):
            codes[c] = 0.0
        return
    least, most = splat16(np.float32(0)), splat16(np.float32(qmax))
    zeros, scales = splat16(zero), splat16(scale)
    for c in range(low, high, LANES):
        ratio = div16(sub16(load16(x, c), zeros), scales)
        store16(codes, c, round16(min16(max16(ratio, least), most)))


@inner
def half_meta(low, high, qmax):
    """fp16 patterns of scale and zero-point for values in `[low, high]`."""
    excess = max((high - low) - _FP16_MAX * np.float32(qmax), np.float32(0))
    zero = half_down_signed(low + excess / np.float32(2))
    scale = half_up(max(high - half_value(zero), np.float32(0)) / np.float32(qmax))
    return scale, zero


@inner
def compact_meta(low, high, qmax, rounding):
    """Scale byte and centre byte for values in `[low, high]` and zero. rounding: 127 = up, 64 = to the nearest."""
    low, high = min(low, np.float32(0)), max(high, np.float32(0))
    scale = min((half_up((high - low) / np.float32(qmax)) + rounding) >> 7, _E5M3_MAX_BITS)
    unit = half_value(np.int64(scale) << 7) * np.float32(qmax / 254)
    centre = np.float32(0)
    if unit > 0:
        centre = (low + high) / np.float32(2) / unit
    magic = np.float32(12582912.0)
    centre = min(max(centre, np.float32(-127)), np.float32(127)) + magic - magic
    return np.uint8(scale), np.uint8(np.int64(centre) & 0xFF)


@inner
def quantise(x, codes, dim, bits, groups, compact, pool8, pool16, meta):
    """Codes (fp32) of one token's keys or values, and its metadata into the page at byte `meta`."""
    qmax, width = (1 << bits) - 1, dim // groups
    for i in range(groups):
        low, high = value_range(x, i * width, (i + 1) * width)
        fitted, coded = False, (low, high)
        if bits <= FITTED_BITS:
            low, high, fitted, coded = fit(x, i * width, (i + 1) * width, low, high, bits)
        if compact:
            rounding = 127 if bits > FITTED_BITS else 64
            pool8[meta + 2 * i], pool8[meta + 2 * i + 1] = compact_meta(low, high, qmax, rounding)
            scale, zero = compact_pair(pool8[meta + 2 * i], pool8[meta + 2 * i + 1], bits)
        else:
            s, z = half_meta(low, high, qmax)
            pool16[meta // 2 + 2 * i], pool16[meta // 2 + 2 * i + 1] = s, z
            scale, zero = half_value(np.int64(s)), half_value(np.int64(z))
        if fitted:
            zero, scale = coded
        codes_of(x, codes, i * width, (i + 1) * width, zero, scale, qmax)


@inner
def pack(codes, bits, row, pool8, start, stride):
    """Planar bytes of codes, `stride` bytes apart: 1 for token-major rows, the page's tokens for channel-major ones."""
    for byte in range(row):
        packed = np.int32(codes[byte])
        for plane in range(1, 8 // bits):
            packed |= np.int32(codes[byte + plane * row]) << (plane * bits)
        pool8[start + byte * stride] = packed


@inner
def write_token(layout, dim, pool8, pool16, pool32, pool_float, page, token, k, v, codes, score, position):
    """Encode one token into its page: k as the tier stores it, k and v fp32 with a vector's room behind them."""
    base = page * layout[PAGE_BYTES]
    if layout[KIND] == QUANTISED:
        groups, key_row = layout[KEY_GROUPS], layout[KEY_ROW]
        meta = base + layout[KEY_META_AT] + token * 4 * groups
        quantise(k, codes, dim, layout[KEY_BITS], groups, False, pool8, pool16, meta)
        pack(codes, layout[KEY_BITS], key_row, pool8, base + layout[KEY_AT] + token * key_row, 1)
        groups, compact = layout[VALUE_GROUPS], layout[COMPACT] != 0
        meta = base + layout[VALUE_META_AT] + token * (2 if compact else 4) * groups
        quantise(v, codes, dim, layout[VALUE_BITS], groups, compact, pool8, pool16, meta)
        pack(codes, layout[VALUE_BITS], layout[VALUE_ROW], pool8, base + layout[VALUE_AT] + token, layout[TOKENS])
    else:
        _write_dense(layout[KIND], k, dim, pool16, pool_float, base + layout[KEY_AT], token)
        _write_dense(layout[KIND], v, dim, pool16, pool_float, base + layout[VALUE_AT], token)
    write_state(layout, pool16, pool32, page, token, score, position)


@inner
def write_state(layout, pool16, pool32, page, token, score, position):
    """Score and position of a token, no votes and log-weight 0, where its tier keeps them."""
    base = page * layout[PAGE_BYTES]
    if layout[SCORES]:
        pool16[(base + layout[SCORE_AT]) // 2 + token] = score_bits(score)
    if layout[POSITIONS]:
        pool32[(base + layout[POSITION_AT]) // 4 + token] = position
    if layout[VOTES]:
        pool16[(base + layout[VOTE_AT]) // 2 + token] = 0
    if layout[WEIGHTS]:
        pool32[(base + layout[WEIGHT_AT]) // 4 + token] = 0


@inner
def _write_dense(kind, x, dim, pool16, pool_float, at, token):
    if kind == FP32:
        for c in range(dim):
            pool_float[at // 4 + token * dim + c] = x[c]
    else:
        for c in range(dim):
            pool16[at // 2 + token * dim + c] = dense_bits(kind, x[c])


@inner
def read_token(layout, dim, pool8, pool16, pool32, pool_float, page, token, k, v):
    """Decode one token of a page into k and v, as the tier stores them; returns its score and position, 0 where none
    is stored.
    """
    base = page * layout[PAGE_BYTES]
    if layout[KIND] == QUANTISED:
        groups, row = layout[KEY_GROUPS], layout[KEY_ROW]
        meta = base + layout[KEY_META_AT] + token * 4 * groups
        at = base + layout[KEY_AT] + token * row
        _read_quantised(k, dim, layout[KEY_BITS], groups, False, pool8, pool16, meta, at, row, 1)
        groups, compact = layout[VALUE_GROUPS], layout[COMPACT] != 0
        meta = base + layout[VALUE_META_AT] + token * (2 if compact else 4) * groups
        at = base + layout[VALUE_AT] + token
        bits, row = layout[VALUE_BITS], layout[VALUE_ROW]
        _read_quantised(v, dim, bits, groups, compact, pool8, pool16, meta, at, row, layout[TOKENS])
    else:
        _read_dense(layout[KIND], k, dim, pool16, pool_float, base + layout[KEY_AT], token)
        _read_dense(layout[KIND], v, dim, pool16, pool_float, base + layout[VALUE_AT], token)
    score, position = np.float32(0), np.int64(0)
    if layout[SCORES]:
        score = score_from_bits(pool16[(base + layout[SCORE_AT]) // 2 + token])
    if layout[POSITIONS]:
        position = np.int64(pool32[(base + layout[POSITION_AT]) // 4 + token])
    return score, position


@inner
def _read_quantised(x, dim, bits, groups, compact, pool8, pool16, meta, at, row, stride):
    mask, width = (1 << bits) - 1, dim // groups
    for i in range(groups):
        if compact:
            scale, zero = compact_pair(pool8[meta + 2 * i], pool8[meta + 2 * i + 1], bits)
        else:
            scale = half_value(np.int64(pool16[meta // 2 + 2 * i]))
            zero = half_value(np.int64(pool16[meta // 2 + 2 * i + 1]))
        for c in range(i * width, (i + 1) * width):
            code = (np.int64(pool8[at + c % row * stride]) >> (c // row * bits)) & mask
            x[c] = np.float32(code) * scale + zero


@inner
def _read_dense(kind, x, dim, pool16, pool_float, at, token):
    if kind == FP32:
        for c in range(dim):
            x[c] = pool_float[at // 4 + token * dim + c]
    else:
        for c in range(dim):
            x[c] = dense_value(kind, pool16[at // 2 + token * dim + c])


@inner
def copy_token(layout, pool8, source_page, source, target_page, target):
    """Move a token's record from one place of a tier to another, byte for byte."""
    pages = (source_page * layout[PAGE_BYTES], target_page * layout[PAGE_BYTES])
    _copy_rows(pool8, pages, layout[KEY_AT], layout[KEY_ROW], source, target)
    if layout[KIND] == QUANTISED:
        _copy_rows(pool8, pages, layout[KEY_META_AT], 4 * layout[KEY_GROUPS], source, target)
        size = (2 if layout[COMPACT] else 4) * layout[VALUE_GROUPS]
        _copy_rows(pool8, pages, layout[VALUE_META_AT], size, source, target)
        for row in range(layout[VALUE_ROW]):
            at = layout[VALUE_AT] + row * layout[TOKENS]
            pool8[pages[1] + at + target] = pool8[pages[0] + at + source]
    else:
        _copy_rows(pool8, pages, layout[VALUE_AT], layout[VALUE_ROW], source, target)
    if layout[SCORES]:
        _copy_rows(pool8, pages, layout[SCORE_AT], 2, source, target)
    if layout[POSITIONS]:
        _copy_rows(pool8, pages, layout[POSITION_AT], 4, source, target)
    if layout[VOTES]:
        _copy_rows(pool8, pages, layout[VOTE_AT], 2, source, target)
    if layout[WEIGHTS]:
        _copy_rows(pool8, pages, layout[WEIGHT_AT], 4, source, target)


@inner
def _copy_rows(pool8, pages, segment, size, source, target):
    for i in range(size):
        pool8[pages[1] + segment + target * size + i] = pool8[pages[0] + segment + source * size + i]
