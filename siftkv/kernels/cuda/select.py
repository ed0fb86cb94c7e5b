"""`select` on a GPU: what the last queries of a request vote for, for all its layers and heads in one launch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from siftkv.errors import FormatError
from siftkv.formats import PageLayout
from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.device import gpu_of
from siftkv.kernels.cuda.driver import Kernel, Module
from siftkv.kernels.cuda.pages import cache_constants, read_sources
from siftkv.kernels.cuda.select_arguments import arguments
from siftkv.kernels.cuda.select_room import room_of
from siftkv.kernels.state import CacheState, Selection, SelectionRule

METRICS = ("attention", "snapkv", "accumulated")
"""Metrics that `select` knows."""

_FIRST = ("ptx.cuh", "cache.cuh", "token.cuh", "select.cuh", "rows.cuh")
_COMMON = ("bars.cuh", "scores.cuh", "decide.cuh")


def _sources(paged: bool, pooled: bool, stored: bool) -> tuple[str, ...]:
    if not paged:
        beside = ("stream.cuh", "histogram.cuh", "shared.cuh", "pool.cuh")
        return (*_FIRST, *beside, *_COMMON, "survey.cuh", "select.cu")
    pools = ("reach.cuh",) if pooled else ()
    return (
        *_FIRST,
        "keys.cuh",
        "histogram.cuh",
        "shared.cuh",
        *_COMMON,
        *pools,
        "warpgroups.cuh",
        *(("ballots.cuh", "buckets.cuh", "surveys.cuh") if stored else ("surveys.cuh", "ballots.cuh", "votes.cuh")),
        "select_paged.cu",
    )


class _Shape(NamedTuple):
    """Teams of warps a block, tiles of 16 rows a warp, tiles of keys that a team has on their way, keys a tile, and
    counters of a bucket, which keep lanes from waiting for each other. paged: tiles are whole pages, which tensor maps
    bring, and teams share what is on its way.
    """

    teams: int
    held: int
    stages: int
    keys: int
    counters: int
    paged: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block: teams that hold 128 rows each, and the warps that copy keys for them."""
        return self.readers + (32 if self.paged and self.teams == 1 else 128)

    @property
    def readers(self) -> int:
        return self.teams * 32 * _ROWS // (16 * self.held)


_PLAIN = (_Shape(2, 2, 4, 32, 4), *(_Shape(1, 2, 3, 32, counters) for counters in (4, 2)))
_HOPPER = {False: _Shape(3, 2, 5, 32, 4), True: _Shape(1, 1, 4, 64, 8)}
"""Best first; shared memory decides. Warpgroups multiply for Hopper's: without pools and with them, where tiles are
larger for what they read of their neighbours'.
"""

_PAGED = {False: _Shape(2, 1, 7, 64, 4, True), True: _Shape(2, 1, 4, 64, 8, True)}
"""Hopper's where all candidates are dense, for head_dim 128: without pools and with them."""

_SCORES = 0x7801
"""Scores that there are, each with a counter."""

_MOST_QUERIES = 128
_MOST_DIM = 128
_MOST_REACH = 4
_ROWS = 128
_SHARED_STEP = 128
_HEAD_BYTES = 128


def selects(state: CacheState, rule: SelectionRule) -> bool:
    """Whether `select` serves a rule on a cache; for others there is `siftkv.policies.hardkv.selection`."""
    layouts = [state.layouts[tier] for tier in rule.sources]
    dim = state.window_k.shape[-1]
    return (
        rule.metric in METRICS
        and (rule.union or _group(state) == 1)
        and (rule.metric != "snapkv" or rule.pool // 2 <= _MOST_REACH)
        and 1 <= state.query_rows <= _MOST_QUERIES
        and dim <= _MOST_DIM
        and dim % 16 == 0
        and all(layout.tier.positions for layout in layouts)
        and (rule.metric != "accumulated" or all(layout.tier.scores for layout in layouts))
        and state.window_k.dtype in (torch.bfloat16, torch.float16)
        and _shape(state, rule) is not None
    )


def _shape(state: CacheState, rule: SelectionRule) -> _Shape | None:
    """The best that the GPU has shared memory for."""
    reach, by_score = _kind(rule)
    gpu = gpu_of(state.pages.device)
    shapes = ((_HOPPER[reach > 0],) if gpu.capability == (9, 0) else ()) + _PLAIN
    if gpu.capability == (9, 0) and _is_paged(state, rule):
        paged = _PAGED[reach > 0]
        shapes = (paged._replace(stages=paged.stages * _MOST_DIM // state.window_k.shape[-1]), *shapes)
    least = 4 * _SCORES if by_score else 0
    fit = (
        x
        for x in shapes
        if _shared_bytes(state, rule, x) <= gpu.dynamic_shared_bytes
        and (x.paged or _scratch_bytes(state, rule, x) >= least)
    )
    return next(fit, None)


def _is_paged(state: CacheState, rule: SelectionRule) -> bool:
    """Whether candidates are dense tokens of pages that tiles of keys are made of."""
    layouts, dim = [state.layouts[tier] for tier in rule.sources], state.window_k.shape[-1]
    one = len(layouts) == 1 and layouts[0].format.dense and not layouts[0].tier.weights
    return one and layouts[0].tokens in ((16, 32, 64) if _kind(rule)[0] else (8, 16, 32, 64)) and dim in (64, 128)


def _group(state: CacheState) -> int:
    return int(state.queries.shape[3] // state.lengths.shape[2])


def select_source(state: CacheState, rule: SelectionRule, stored: bool = False) -> str:
    """The whole source, its constants first. stored: buckets of logits are kept between its halves."""
    c, shape = state.conditioning, _shape(state, rule)
    assert shape is not None
    return _source(
        state.layouts,
        state.window_k.dtype,
        c.rotates,
        c.has_bias,
        rule.sources,
        _group(state),
        state.query_rows,
        *_kind(rule),
        shape,
        _shared_bytes(state, rule, shape),
        stored,
    )


def _stores(rule: SelectionRule, shape: _Shape, columns: int) -> bool:
    """Whether buckets of logits suffice: scores and budgets ask for more."""
    return shape.paged and not _kind(rule)[1] and rule.budget >= columns


def _kind(rule: SelectionRule) -> tuple[int, bool]:
    """Positions that a token's maximum reaches to either side, and whether scores rank. Where everything is kept it
    does not matter what ranks.
    """
    pooled = rule.metric == "snapkv" and rule.p < 1.0
    return (rule.pool // 2 if pooled else 0), rule.metric == "accumulated" and rule.p < 1.0


def _source(
    layouts: tuple[PageLayout, ...],
    dtype: torch.dtype,
    rotates: bool,
    has_bias: bool,
    sources: tuple[int, ...],
    group: int,
    query_rows: int,
    reach: int,
    by_score: bool,
    shape: _Shape,
    shared: int,
    stored: bool,
) -> str:
    values = {
        "GROUP": group,
        "QUERY_ROWS": query_rows,
        "SOURCES": len(sources),
        "REACH": reach,
        "BY_SCORE": int(by_score),
        "STORED": int(stored),
        **{name.upper(): int(value) for name, value in shape._asdict().items() if name != "paged"},
        "SOURCE": sources[0],
        "SHARED_BYTES": shared,
        "WEIGHTED": int(any(layouts[tier].tier.weights for tier in sources)),
    }
    scale = math.log2(math.e) / math.sqrt(layouts[0].head_dim)
    constants = [
        f"#define PAGED {int(shape.paged)}\n#define REACHES {int(reach > 0)}\n#define STORES {int(stored)}",
        *cache_constants(layouts, dtype, rotates, has_bias),
        *(f"constexpr int {name} = {value};" for name, value in values.items()),
        f"constexpr float LOGIT_SCALE = {scale!r}f, LOG2_E = {math.log2(math.e)!r}f;",
        "#define EACH_SOURCE(X) " + " ".join(f"X({tier})" for tier in sources),
    ]
    return "\n".join([*constants, read_sources(_sources(shape.paged, reach > 0, stored))])


def compiled_for(arch: str) -> str:
    """The architecture that `select` is compiled for on a GPU of `arch`: Hopper's own code alone has products of
    warpgroups.
    """
    return "sm_90a" if arch == "sm_90" else arch


@lru_cache(maxsize=32)
def _compiled(source: str, shape: _Shape, size: int, device: torch.device) -> Kernel:
    code = compile_cubin(source, compiled_for(architecture(device)))
    return Module(code).kernel("select", shape.threads, size)


def _scratch_bytes(state: CacheState, rule: SelectionRule, shape: _Shape) -> int:
    """Histograms and the rings of keys."""
    dim = state.window_k.shape[-1]
    if shape.paged:
        return shape.stages * 2 * dim * shape.keys
    beside = (_kind(rule)[0] > 0) + any(state.layouts[tier].tier.weights for tier in rule.sources)
    ring = shape.teams * shape.stages * (2 * state.window_k.shape[-1] * (shape.keys + 1) + 4 * beside * shape.keys)
    return shape.counters * 64 * _ROWS // 2 * 4 + ring


def _shared_bytes(state: CacheState, rule: SelectionRule, shape: _Shape) -> int:
    """Shared memory of a block: `Shared` of `src/survey.cuh`."""
    barriers = shape.stages * shape.readers // 64 if shape.paged else 2 * shape.teams * shape.stages
    threads = shape.readers if shape.paged else shape.threads
    pooled = _kind(rule)[0] > 0
    queries = (_MOST_DIM if pooled else 2 * state.window_k.shape[-1]) * _ROWS
    positions = 4 * (shape.stages * (shape.keys + 8) if pooled else shape.keys)
    own = (queries, positions, shape.counters * 64 * _ROWS // 2 * 4, 8 * _ROWS, 16, 4 * _ROWS + 32 + 512)
    parts = (
        _scratch_bytes(state, rule, shape),
        *(own if shape.paged else ()),
        8 * barriers,
        (2 * shape.teams + threads // _ROWS) * _ROWS * 4,
        7 * _ROWS * 4 + _MOST_QUERIES * 4,
        threads * 4 + _HEAD_BYTES,
    )
    return -(-sum(parts) // _SHARED_STEP) * _SHARED_STEP


def select(state: CacheState, slot: int, rule: SelectionRule, longest: int | None = None) -> Selection:
    """Which candidates of the request in `slot` its last queries keep, for all layers and heads; the semantics of
    `siftkv.policies.hardkv.selection.vote` and `capped` in rank mode.

    Softmax runs over sinks, window and `rule.sources`: they name every tier in which the request has tokens.
    longest: the most candidates that a head can have (what is known of the request's length); None = what its page
        table can hold. Candidates beyond are not looked at, and `rewrite` keeps them.
    Votes are added to those stored beside the tokens and, but for "accumulated", scores become mean attention of these
    queries. Under a budget tokens rank by (stored votes, mean attention). Where there is none, and buckets of logits
    are kept between the halves of a selection (`siftkv.kernels.cuda.select_room`), scores stay as they are, and
    `Selection.mass` is an estimate, good to 0.02.

    A row's count comes from a histogram of its logits, b = 8 buckets an octave ("snapkv": 4). It takes in all that the
    exact set for p needs, and at most the exact set for 1 - (1 - p) 2^(-1/b) (0.908 for 0.9; "snapkv" 0.916) and the
    tokens within a bucket of its weakest. "snapkv" and "accumulated" also take in what is in one bucket with, or has
    the same score as, the last that counts; "snapkv" what a neighbour raises 13 octaves above the row's weakest. Heads
    of more than 65,535 tokens, and requests without queries, keep everything.

    Nothing is read by the host; the current stream is used. Raises FormatError for a rule that it does not serve
    (`selects`).
    """
    if not selects(state, rule):
        raise FormatError(
            f"the GPU selection serves {', '.join(METRICS)} by union with a ring of queries, positions and head_dim up "
            f"to {_MOST_DIM} where shared memory suffices, "
            f"not metric={rule.metric}, union={rule.union}, pool={rule.pool}"
        )
    layers, heads = state.lengths.shape[1:3]
    kernels: dict[tuple[object, ...], Kernel] = state.scratch.setdefault("cuda_select", {})
    shape = _shape(state, rule)
    assert shape is not None
    columns = state.width * max(state.layouts[tier].tokens for tier in rule.sources) if longest is None else longest
    room = room_of(state, columns + state.window_k.shape[-2]) if _stores(rule, shape, columns) else None
    key = (rule.sources, *_kind(rule), room is not None)
    if key not in kernels:
        size = _shared_bytes(state, rule, shape)
        kernels[key] = _compiled(select_source(state, rule, room is not None), shape, size, state.pages.device)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=state.pages.device)

    found = Selection(
        keep=empty(layers, heads, columns, dtype=torch.uint8),
        kept=empty(layers, heads, dtype=torch.int32),
        mass=empty(layers, heads),
    )
    tally = empty(layers, heads, columns, dtype=torch.int64)
    given = {"queries": state.queries, "keep": found.keep, "kept": found.kept, "covered": found.mass, "tally": tally}
    launched = arguments(state, given, rule.sources[0] if shape.paged else None, _kind(rule)[0] > 0)
    launched.slot, launched.columns, launched.budget = slot, columns, min(rule.budget, 2**31 - 1)
    launched.p = rule.p
    if room is not None:
        launched.buckets, launched.taken = room.buckets.data_ptr(), room.taken.data_ptr()
        launched.rooms, launched.room_tiles = room.buckets.shape[:2]
    kernels[key].launch((layers * heads, 1), launched)
    return found
