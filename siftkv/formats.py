"""How one token's key and value are stored, and how tokens share a page: the only source of these numbers, kernels
included.

A *format* is `k<key bits>v<value bits>` (`k8v4`: 8-bit keys, 4-bit values) or a floating-point one (`bf16`, `fp16`,
`fp32`; `fp8`: e4m3 with a scale of 1, as other engines keep keys and values in 8 bits by default).
Suffixes: `_g<key groups><value groups>` for several scales a token (`k4v2_g24`), `c` for compact value metadata
(`k4v2c`). Two more are baselines that only the reference kernels know, with keys as the model made them: `t` for keys
with a scale a channel over 32 tokens and values with one for 32 channels (`k2v2t`, as KIVI), `o<n>` for the `n` lowest
and `n` highest channels of every key and value apart, at 16 bits (`k4v4o1`, as QAQ).

A *page* is a fixed number of bytes that holds tokens of one head slot in one format, in up to eight
segments, empty where its tier keeps nothing of the kind:

    key codes | key metadata | value codes | value metadata | scores | positions | votes | weights

Quantised keys are token-major `[tokens, row]`, quantised values channel-major `[row, tokens]`; both are planar: byte
`j` of a row holds channel `j + i * row` in bits `[i*b, (i+1)*b)`, so that unpacking is a mask and a shift. A sub-group
is a contiguous slice of channels, that is a plane or a union of planes. Dense keys and values are token-major.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from siftkv.errors import FormatError

SEGMENT_ALIGN = 16
"""Bytes. Every segment of a page starts at a multiple of this, so that 16-byte vector loads are possible."""

TOKEN_QUANTUM = 8
"""Quantised formats hold a multiple of this many tokens a page, so that 8-byte loads of channel-major values never
straddle pages.
"""

SCORE_BYTES = 2
POSITION_BYTES = 4
VOTE_BYTES = 2
WEIGHT_BYTES = 4
META_BYTES = 2
"""Bytes of one fp16 scale or zero-point."""

DENSE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Formats of a model's own element types, which windows have too."""

PLAIN_DTYPES = DENSE_DTYPES | {"fp8": torch.float8_e4m3fn}
"""Dense formats and the element type in which they keep keys and values."""

_PATTERN = re.compile(r"k([1248])v([1248])(?:_g(\d)(\d)(c?)|(c)|(t)|o([1-4]))?")

CHANNEL_GROUP = 32
"""Tokens, and channels, that share a scale and zero-point in formats with `t`."""

OUTLIER_BYTES = 3
"""Bytes of one outlier: an fp16 number and its channel."""


@dataclass(frozen=True)
class TierFormat:
    """Storage of one token's key and value.

    key_bits, value_bits: 1, 2, 4 or 8; 8, 16 or 32 when `dense`.
    key_groups, value_groups: scale/zero pairs a token, each over a contiguous slice of channels.
    compact: value scale and zero-point in one byte each instead of fp16.
    channels: keys share scales by channel, `CHANNEL_GROUP` tokens each. outliers: lowest and highest channels apart.
    """

    name: str
    key_bits: int
    value_bits: int
    key_groups: int = 1
    value_groups: int = 1
    compact: bool = False
    dense: bool = False
    channels: bool = False
    outliers: int = 0

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(name: str) -> TierFormat:
        """`TierFormat.parse("k4v2_g24")`. Raises FormatError for a name that no format has."""
        if name in PLAIN_DTYPES:
            bits = 8 * PLAIN_DTYPES[name].itemsize
            return TierFormat(name, bits, bits, 0, 0, dense=True)
        found = _PATTERN.fullmatch(name)
        if found is None:
            raise FormatError(
                f"unknown format {name!r}: use bf16, fp16, fp32, fp8 or k<bits>v<bits> with 1, 2, 4 or 8 bits, "
                f"such as {', '.join(KNOWN_FORMATS[1:6])}"
            )
        key_bits, value_bits = int(found[1]), int(found[2])
        key_groups, value_groups = int(found[3] or 1), int(found[4] or 1)
        if key_groups not in (1, 2, 4, 8) or value_groups not in (1, 2, 4, 8):
            raise FormatError(f"format {name!r}: sub-groups must be 1, 2, 4 or 8")
        compact, channels, outliers = bool(found[5] or found[6]), bool(found[7]), int(found[8] or 0)
        return TierFormat(name, key_bits, value_bits, key_groups, value_groups, compact, False, channels, outliers)

    @property
    def precision(self) -> tuple[int, int, int, int, bool, int]:
        """Sorts formats by how precisely they keep a token: keys first, since errors in keys cost most."""
        groups = self.key_groups, self.value_groups
        return self.key_bits, self.value_bits, *groups, not self.compact, self.outliers + self.channels

    @property
    def plain(self) -> bool:
        """Whether keys are stored as the model made them; other formats store conditioned keys."""
        return self.dense or self.channels or self.outliers > 0

    @property
    def reference_only(self) -> bool:
        """Whether only the reference kernels know the format."""
        return self.channels or self.outliers > 0 or (self.dense and self.name not in DENSE_DTYPES)

    @property
    def key_meta_bytes(self) -> int:
        """Bytes of key scales and zero-points a token."""
        return 2 * META_BYTES * self.key_groups

    @property
    def value_meta_bytes(self) -> int:
        """Bytes of value scales and zero-points a token."""
        return 2 * (1 if self.compact else META_BYTES) * self.value_groups


KNOWN_FORMATS = ("bf16", "k8v8", "k8v4", "k8v2", "k4v4", "k4v2", "k4v1", "k4v8", "k2v4")
"""The pairs that the DiffKV paper measures. Any other `k<bits>v<bits>` works as well."""


@dataclass(frozen=True)
class Tier:
    """A place for tokens in paged memory: a format, and which per-token state stands beside the codes.

    scores: a mean attention a token (2 bytes). positions: the token's true position (4 bytes). votes: how often queries
        selected it (uint16, saturating). weights: a log-weight (fp32) that is added to its logit. Off where nothing
        reads them.
    """

    format: TierFormat
    scores: bool = True
    positions: bool = True
    votes: bool = False
    weights: bool = False

    def __post_init__(self) -> None:
        if self.scores and not self.positions:
            raise FormatError(f"tier {self.name}: a mean score cannot be updated without its token's position")

    @property
    def name(self) -> str:
        return self.format.name


@dataclass(frozen=True)
class PageLayout:
    """Where everything stands inside a page of `page_bytes` that holds tokens of one tier. All offsets in bytes."""

    tier: Tier
    head_dim: int
    page_bytes: int

    def __post_init__(self) -> None:
        if self.head_dim % 8:
            raise FormatError(f"head_dim {self.head_dim} is not a multiple of 8, so planar packing cannot hold it")
        fmt = self.format
        if not fmt.dense and (self.head_dim % fmt.key_groups or self.head_dim % fmt.value_groups):
            raise FormatError(f"format {fmt.name}: sub-groups do not divide head_dim {self.head_dim}")
        if fmt.channels and self.head_dim % CHANNEL_GROUP:
            raise FormatError(f"format {fmt.name}: head_dim {self.head_dim} is not a multiple of {CHANNEL_GROUP}")
        if self.tokens < 1:
            raise FormatError(
                f"a page of {self.page_bytes} bytes holds no token of {fmt.name} at head_dim {self.head_dim}"
            )

    @property
    def format(self) -> TierFormat:
        return self.tier.format

    @property
    def key_row(self) -> int:
        """Bytes of one token's key codes."""
        return self.head_dim * self.format.key_bits // 8

    @property
    def value_row(self) -> int:
        """Bytes of one token's value codes."""
        return self.head_dim * self.format.value_bits // 8

    @property
    def state_bytes(self) -> int:
        """Bytes a token beside its codes: scales, zero-points, score, position, votes, log-weight."""
        return sum(self._token_state) + self.key_meta_bytes + self.value_meta_bytes

    @property
    def key_meta_bytes(self) -> int:
        """Bytes of key scales, zero-points and outliers a token."""
        return self._meta_bytes(self.format.key_meta_bytes)

    @property
    def value_meta_bytes(self) -> int:
        """Bytes of value scales, zero-points and outliers a token."""
        return self._meta_bytes(self.format.value_meta_bytes)

    def _meta_bytes(self, usual: int) -> int:
        fmt = self.format
        if fmt.dense:
            return 0
        if fmt.channels:
            return 2 * META_BYTES * self.head_dim // CHANNEL_GROUP
        return usual + 2 * fmt.outliers * OUTLIER_BYTES

    @property
    def _token_state(self) -> tuple[int, int, int, int]:
        """Bytes of a token's score, position, votes and log-weight."""
        tier = self.tier
        return (
            SCORE_BYTES * tier.scores,
            POSITION_BYTES * tier.positions,
            VOTE_BYTES * tier.votes,
            WEIGHT_BYTES * tier.weights,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes a token takes, without the page's unused end."""
        return self.key_row + self.value_row + self.state_bytes

    @cached_property
    def tokens(self) -> int:
        """Tokens a page: as many as fit, in quantised formats a multiple of `TOKEN_QUANTUM`."""
        quantum = 1 if self.format.dense else TOKEN_QUANTUM
        tokens = self.page_bytes // self.token_bytes // quantum * quantum
        while tokens > 0 and self._end(tokens) > self.page_bytes:
            tokens -= quantum
        return tokens

    @property
    def waste(self) -> float:
        """Share of a full page's bytes that holds nothing."""
        return 1.0 - self.tokens * self.token_bytes / self.page_bytes

    @property
    def bytes_per_token(self) -> float:
        """Physical bytes a token in a full page, waste included."""
        return self.page_bytes / self.tokens

    def _segments(self, tokens: int) -> list[int]:
        sizes = [
            self.key_row,
            self.key_meta_bytes,
            self.value_row,
            self.value_meta_bytes,
            *self._token_state,
        ]
        offsets, at = [], 0
        for size in sizes:
            offsets.append(at)
            at += -(-size * tokens // SEGMENT_ALIGN) * SEGMENT_ALIGN
        return [*offsets, at]

    def _end(self, tokens: int) -> int:
        return self._segments(tokens)[-1]

    @cached_property
    def offsets(self) -> tuple[int, int, int, int, int, int, int, int]:
        """Start of key codes, key metadata, value codes, value metadata, scores, positions, votes, weights."""
        key, key_meta, value, value_meta, score, position, vote, weight, _ = self._segments(self.tokens)
        return key, key_meta, value, value_meta, score, position, vote, weight

    @cached_property
    def record(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Byte `i` of token `t` stands at `base[i] + stride[i] * t` of its page: `(base, stride)`, int64
        `[token_bytes]`.

        The order of a record is the order of the segments: key row, key metadata, value row, value metadata, score,
        position, votes, weight.
        """
        fmt, (key, key_meta, value, value_meta, *state) = self.format, self.offsets
        base: list[int] = []
        stride: list[int] = []

        def token_major(start: int, size: int) -> None:
            base.extend(range(start, start + size))
            stride.extend([size] * size)

        token_major(key, self.key_row)
        if not fmt.dense:
            token_major(key_meta, self.key_meta_bytes)
            base.extend(range(value, value + self.value_row * self.tokens, self.tokens))
            stride.extend([1] * self.value_row)
            token_major(value_meta, self.value_meta_bytes)
        else:
            token_major(value, self.value_row)
        for start, size in zip(state, self._token_state, strict=True):
            token_major(start, size)
        return torch.tensor(base, dtype=torch.int64), torch.tensor(stride, dtype=torch.int64)
