"""What the kernels are compiled for: a cache's sizes, formats and page layouts become constants of the source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from siftkv.errors import FormatError
from siftkv.kernels.cuda.bias import NEAR, TURNS, bias_blocks, turn_rows
from siftkv.kernels.cuda.device import gpu_of
from siftkv.kernels.cuda.tiers import TierPlan, align, check_format
from siftkv.kernels.state import CacheState

__all__ = ["Plan", "TierPlan"]

_FLIGHT = 104 * 1024
"""Bytes on their way to a multiprocessor up to which it pays to have 16 warps. More makes multiprocessors starve each
other: the slowest, which decides, then falls a tenth behind the mean."""

_AMPLE_SHARED = 200 * 1024
"""Bytes of shared memory a block that 12 warps with pages of their own usually fit into: Hopper has them."""

_NOTE_BYTES = 32
"""A stage's barrier and note."""

_READ_PAST_END = 1024
"""Bytes behind the last stage: a tile of 32 tokens may read, and ignore, what stands behind a page."""

_SOURCES = (
    *("ptx.cuh", "state.cuh", "bias.cuh", "online.cuh", "quantised.cuh", "dense.cuh"),
    *("prepare.cu", "attend.cu", "merge.cu"),
)
_RUN_ROWS = (64, 32)
"""Positions of a run whose factors may stand in shared memory: two tiles of tokens share coefficients, or one has its
own."""

_MOST_GROUP = 16
_COST_UNIT = 16
_SEGMENT_COST = 64
"""In cost units: what a segment takes beside its blocks."""
_HEAD_COST = 320
"""And a head: a window of its own, a result to write. Without it short heads pile up on few warps."""


@dataclass(frozen=True)
class Plan:
    """Constants of one cache at one GQA group.

    warps: a multiprocessor; team: warps that share a page; most_stages: pages a team holds. For measuring other shapes
    of the grid; 0 = chosen.
    """

    state: CacheState
    group: int
    warps: int = 0
    team: int = 0
    most_stages: int = 2

    def __post_init__(self) -> None:
        if self.group > _MOST_GROUP or self.dim % 16 or self.dim > 256:
            raise FormatError(
                f"the GPU kernels serve up to {_MOST_GROUP} query heads a kv head and head_dim up to 256 in steps of "
                f"16, not {self.group} and {self.dim}"
            )
        if self.state.window_k.dtype not in (torch.bfloat16, torch.float16):
            raise FormatError(
                "the GPU kernels need a bf16 or fp16 model: load it with dtype='bfloat16', or use kernels='reference'"
            )
        if self.state.pages.shape[1] % 16:
            raise FormatError("the GPU kernels need page_bytes to be a multiple of 16")
        for layout in self.state.layouts:
            check_format(layout, self.state.window_k.dtype, self.state.conditioning.has_bias)

    @property
    def dim(self) -> int:
        return self.state.window_k.shape[-1]

    @cached_property
    def tiers(self) -> tuple[TierPlan, ...]:
        return tuple(TierPlan(layout, self.bias_blocks > 0) for layout in self.state.layouts)

    @property
    def columns(self) -> int:
        """Tiles of 8 query heads."""
        return -(-self.group // 8)

    @property
    def bias_blocks(self) -> int:
        return bias_blocks(self.state.conditioning)

    @cached_property
    def run_rows(self) -> int:
        """Positions of a run whose factors stand in shared memory: as many as fit beside the stages."""
        if not self.bias_blocks or self.state.conditioning.rates is None:
            return 0
        left = self._room - self.teams * self.stages * (self.stage_bytes + _NOTE_BYTES)
        return next((rows for rows in _RUN_ROWS if self._run_bytes(rows) <= left), 0)

    @property
    def _run_heads(self) -> int:
        """Heads whose factors of runs stand in shared memory: a multiprocessor's shares rarely have more."""
        return min(2, self.state.lengths.shape[2])

    def _run_bytes(self, rows: int) -> int:
        return self._run_heads * self.bias_blocks * (rows * 64 + rows // 16 * 64)

    @property
    def _dense_row(self) -> int:
        return 2 * self.dim + 16

    def _tier_stage(self, tier: TierPlan) -> int:
        if tier.layout.tier.weights:
            return tier.weight_stage + tier.row_bytes
        return 2 * tier.layout.tokens * self._dense_row if tier.dense else tier.copied_bytes

    @cached_property
    def window_block(self) -> int:
        """Window rows a block: what fits where a page does, 8 to 32."""
        rows = max(self._tier_stage(tier) for tier in self.tiers) // (2 * self._dense_row)
        return 16 * min(2, rows // 16) if rows >= 16 else max(8, rows)

    @cached_property
    def stage_bytes(self) -> int:
        return align(
            max(2 * self.window_block * self._dense_row, *(self._tier_stage(tier) for tier in self.tiers)), 128
        )

    @cached_property
    def _shape(self) -> tuple[int, int]:
        """Warps a multiprocessor, and warps that share a page, so that every team has two stages."""
        if self.warps:
            return self.warps, self.team or 1
        heavy = self.dim * self.columns > 128
        shapes = ((8, 1), (8, 2), (8, 4), (8, 8)) if heavy else ((16, 1), (12, 1), (12, 2), (12, 4), (12, 12))
        # Where shared memory is small, a warp that shares a page has often nothing to do: rather fewer warps.
        fewer = range(7, 3, -1) if heavy else range(11, 4, -1)
        alone = [(warps, 1) for warps in fewer] if self._room < _AMPLE_SHARED else []
        for warps, team in sorted((*shapes, *alone), key=lambda shape: (shape[1], -shape[0])):
            if warps == 16 and (self.bias_blocks or 32 * max(map(self._tier_stage, self.tiers)) > _FLIGHT):
                continue
            if self._stages(warps // team) >= 2:
                return warps, team
        size = self.state.pages.shape[1]
        raise FormatError(
            f"pages of {size} bytes are too large for the GPU kernels: open the pool with smaller page_bytes"
        )

    @property
    def grid_warps(self) -> int:
        return self._shape[0]

    @property
    def team_warps(self) -> int:
        return self._shape[1]

    @property
    def teams(self) -> int:
        """Teams a multiprocessor."""
        return self.grid_warps // self.team_warps

    @cached_property
    def stages(self) -> int:
        return min(self.most_stages, self._stages(self.teams))

    def _stages(self, teams: int) -> int:
        return self._room // (max(1, teams) * (self.stage_bytes + _NOTE_BYTES))

    @property
    def _room(self) -> int:
        """Bytes for all stages of a multiprocessor."""
        return gpu_of(self.state.pages.device).dynamic_shared_bytes - _READ_PAST_END

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the attention kernel."""
        stages = self.teams * self.stages * (self.stage_bytes + _NOTE_BYTES)
        return stages + _READ_PAST_END + self._run_bytes(self.run_rows)

    def _cost(self, nbytes: int) -> int:
        return -(-nbytes // _COST_UNIT)

    @cached_property
    def costs(self) -> list[int]:
        """Of a block of each kind, window first."""
        return [
            self._cost(self.window_block * 4 * self.dim),
            *(self._cost(self._tier_stage(tier)) for tier in self.tiers),
        ]

    @property
    def least_share(self) -> int:
        """Of the line of cost, that a team gets. `merge` expects a result of every share between a head's first and
        last block, so none may be so short that no block begins in it: a block and a segment's own cost.
        """
        return max(self.costs) + _SEGMENT_COST

    @property
    def pair_share(self) -> int:
        """Of the line of cost, that a team gets where there is more than `least_share` for each: two blocks, since
        shares between one block and two would give some teams two all the same.
        """
        return 2 * max(self.costs) + _SEGMENT_COST

    def source(self) -> str:
        """The whole source, its constants first."""
        folder = Path(__file__).parent / "src"
        return "\n".join([self._constants(), *((folder / name).read_text() for name in _SOURCES)])

    def _constants(self) -> str:
        state, c, dim = self.state, self.state.conditioning, self.dim
        values = {
            "HEAD_DIM": dim,
            "GROUP": self.group,
            "NT": self.columns,
            "KV_HEADS": state.lengths.shape[2],
            "LAYERS": state.lengths.shape[1],
            "TIERS": len(self.tiers),
            "SINK_ROWS": state.sink_rows,
            "RING_ROWS": state.ring_rows,
            "TABLE_WIDTH": state.width,
            "TABLE_ROWS": state.page_table.shape[3],
            "PAGE_BYTES": state.pages.shape[1],
            "HADAMARD_BLOCK": dim & -dim if c.rotates else 1,
            "BIAS_BLOCKS": self.bias_blocks,
            "NEAR": NEAR,
            "TURNS": TURNS,
            "RUN_ROWS": self.run_rows,
            "RUN_HEADS": self._run_heads,
            "TURN_ROWS": turn_rows(c),
            "STEADY_TURNS": int(c.rates is not None),
            "PAIRS": c.pairs.shape[-1],
            "ROTARY_POSITIONS": c.cos.shape[0],
            "QUERY_WORDS": self.query_words,
            "MOST_KEY_GROUPS": self.most_key_groups,
            "MOST_VALUE_GROUPS": max(1, *(t.layout.format.value_groups for t in self.tiers)),
            "LOGIT_ROW": self.logit_row,
            "WINDOW_BLOCK": self.window_block,
            "SEGMENT_COST": _SEGMENT_COST,
            "HEAD_COST": _HEAD_COST,
            "QUANTISED_TIERS": sum(not tier.dense for tier in self.tiers),
            "LEAST_SHARE": self.least_share,
            "PAIR_SHARE": self.pair_share,
            "STAGE_BYTES": self.stage_bytes,
            "STAGES": self.stages,
            "TEAM": self.team_warps,
            "TEAMS": self.teams,
            "QUERY_ROWS": state.query_rows,
            "SKIPS": int(state.skips),
        }
        scale = math.log2(math.e) / math.sqrt(dim)
        return "\n".join(
            [
                f"#define MODEL_BF16 {int(state.window_k.dtype == torch.bfloat16)}",
                *(f"constexpr int {name} = {value};" for name, value in values.items()),
                f"constexpr float LOGIT_SCALE = {scale!r}f, LOG2_E = {math.log2(math.e)!r}f;",
                _by_kind("BLOCK_TOKENS", [self.window_block, *(t.layout.tokens for t in self.tiers)]),
                _by_kind("BLOCK_COST", self.costs),
                _by_kind("KEEPS_SCORES", [1, *(int(t.layout.tier.scores) for t in self.tiers)]),
                "template <int INDEX> struct Tier;",
                *(tier.constants(index) for index, tier in enumerate(self.tiers)),
                "#define EACH_TIER(X) " + " ".join(f"X({index})" for index in range(len(self.tiers))),
            ]
        )

    @property
    def query_words(self) -> int:
        """32-bit words of query operands that a lane holds."""
        words = (2 * t.key_words * (8 // t.layout.format.key_bits) for t in self.tiers if not t.dense)
        return align(max(self.dim // 8, *words, 0) * self.columns, 4)

    @property
    def most_key_groups(self) -> int:
        return max(1, *(t.layout.format.key_groups for t in self.tiers))

    @property
    def logit_row(self) -> int:
        """Numbers that a token's logits take."""
        return align(self.group, 2)


def _by_kind(name: str, values: list[int]) -> str:
    chain = "".join(f"(kind) == {kind} ? {value} : " for kind, value in enumerate(values[:-1]))
    return f"#define {name}(kind) ({chain}{values[-1]})"
