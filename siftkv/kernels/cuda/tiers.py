"""One tier as the GPU kernels see it, and which tiers they can read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from siftkv.errors import FormatError
from siftkv.formats import PageLayout


def align(x: int, to: int) -> int:
    return -(-x // to) * to


@dataclass(frozen=True)
class TierPlan:
    """One tier as the kernel sees it.

    positions: whether attention reads its positions.
    """

    layout: PageLayout
    positions: bool = False

    @property
    def dense(self) -> bool:
        return self.layout.format.dense

    @property
    def key_words(self) -> int:
        """32-bit words of a key row that each of the four lanes of a row reads."""
        return -(-self.layout.key_row // 16)

    @property
    def key_wide(self) -> int:
        """Words a load, as the alignment of rows allows."""
        if self.layout.key_row % 16:
            return 1
        return next(wide for wide in (4, 2, 1) if self.key_words % wide == 0)

    @property
    def row_bytes(self) -> int:
        """Of one 32-bit number a token."""
        return align(4 * self.layout.tokens, 16)

    @property
    def copied_bytes(self) -> int:
        """A page's first bytes, which attention copies in one piece: codes and their metadata, and positions, with the
        scores before them, where it reads those: a second copy a page would cost more than 2 bytes a token do.
        """
        return self.layout.offsets[5] + self.row_bytes if self.positions else self.layout.offsets[4]

    @property
    def weight_stage(self) -> int:
        """Where log-weights stand behind what is copied of a page or, dense, its rows."""
        layout = self.layout
        return 2 * layout.tokens * (2 * layout.head_dim + 16) if self.dense else align(self.copied_bytes, 16)

    def constants(self, index: int) -> str:
        fmt, layout = self.layout.format, self.layout
        key, key_meta, value, value_meta, score, position, vote, weight = layout.offsets
        values = {
            "INDEX": index,
            "DENSE": int(fmt.dense),
            "KB": fmt.key_bits,
            "VB": fmt.value_bits,
            "KG": max(1, fmt.key_groups),
            "VG": max(1, fmt.value_groups),
            "COMPACT": int(fmt.compact),
            "TOKENS": layout.tokens,
            "KEY": key,
            "KEY_META": key_meta,
            "VALUE": value,
            "VALUE_META": value_meta,
            "SCORE": score,
            "POSITION": position,
            "SCORES": int(layout.tier.scores),
            "POSITIONS": int(layout.tier.positions),
            "VOTE": vote,
            "WEIGHT": weight,
            "VOTES": int(layout.tier.votes),
            "WEIGHTS": int(layout.tier.weights),
            "KEY_ROW": layout.key_row,
            "KEY_WORDS": self.key_words,
            "KEY_WIDE": self.key_wide,
            "KEY_PLANES": max(1, 8 // fmt.key_bits),
            "COPIED_BYTES": self.copied_bytes,
            "WEIGHT_BYTES": self.row_bytes,
            "WEIGHT_STAGE": self.weight_stage,
        }
        body = ", ".join(f"{name} = {value}" for name, value in values.items())
        return f"template <> struct Tier<{index}> {{ static constexpr int {body}; }};"


def check_format(layout: PageLayout, dtype: torch.dtype, bias: bool) -> None:
    """Raise FormatError, naming what would do, unless the kernels can read a tier."""
    fmt, dim = layout.format, layout.head_dim
    if fmt.dense:
        if fmt.key_bits != 16 or {"bf16": torch.bfloat16, "fp16": torch.float16}[fmt.name] != dtype:
            raise FormatError(f"the GPU kernels read dense pages in the model's own 16-bit type, not {fmt.name}")
        return
    planes = 8 // fmt.key_bits, 8 // fmt.value_bits
    if fmt.key_groups > planes[0] or fmt.value_groups > planes[1]:
        raise FormatError(
            f"the GPU kernels need a sub-group to be whole planes: {fmt.name} has more than {planes[0]} key or "
            f"{planes[1]} value groups"
        )
    value_rows = dim // planes[1]
    if layout.key_row % 4 or value_rows % 8 or (fmt.value_groups > 1 and value_rows % 16):
        raise FormatError(f"the GPU kernels cannot read {fmt.name} at head_dim {dim}: use more value bits or one group")
    if bias and not layout.tier.positions:
        raise FormatError(f"tier {fmt.name} needs positions, because this model's key bias is added back by position")
