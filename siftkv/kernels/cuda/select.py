"""`select` on a GPU: what the last queries of a request vote for, for all its layers and heads in one launch."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch
from torch import Tensor

from siftkv.errors import FormatError
from siftkv.formats import PageLayout
from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.device import gpu_of
from siftkv.kernels.cuda.driver import Kernel, Module
from siftkv.kernels.cuda.pages import CacheArguments, CacheKernels, cache_constants, read_sources
from siftkv.kernels.state import CacheState, Selection, SelectionRule

METRICS = ("attention", "snapkv", "accumulated")
"""Metrics that `select` knows."""

_SOURCES = ("ptx.cuh", "cache.cuh", "token.cuh", "select.cuh", "pool.cuh", "decide.cuh", "survey.cuh", "select.cu")
_HELD, _STAGES = 2, 3
"""Tiles of 16 rows a warp, and tiles of keys that a team has on their way."""

_SHAPES = ((3, 4), (3, 2), (1, 4), (2, 2), (1, 2), (2, 1), (1, 1))
"""Teams of warps a block, and counters of a bucket, which keep lanes from waiting for each other; best first. Shared
memory decides.
"""

_SCORE_COUNTERS = 4
"""Counters a bucket that make histograms large enough for one of all scores."""

_MOST_QUERIES = 128
_MOST_DIM = 128
_MOST_REACH = 4
_ROWS = 128
_SHARED_STEP = 128
_HEAD_BYTES = 128

_POINTERS = ("queries", "keep", "kept", "covered", "tally")


class _Select(ctypes.Structure):
    """`Select` of `src/select.cuh`, field by field."""

    _fields_ = (
        ("cache", CacheArguments),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in ("slot", "columns", "budget")),
        ("p", ctypes.c_float),
    )


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


def _shape(state: CacheState, rule: SelectionRule) -> tuple[int, int] | None:
    """The best of `_SHAPES` that the GPU has shared memory for."""
    reach, by_score = _kind(rule)
    least = _SCORE_COUNTERS if by_score else 2 if reach else 1
    room, dim = gpu_of(state.pages.device).dynamic_shared_bytes, state.window_k.shape[-1]
    fit = (shape for shape in _SHAPES if shape[1] >= least and shared_bytes(dim, *shape) <= room)
    return next(fit, None)


def _group(state: CacheState) -> int:
    return int(state.queries.shape[3] // state.lengths.shape[2])


def select_source(state: CacheState, rule: SelectionRule) -> str:
    """The whole source, its constants first."""
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
        *shape,
    )


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
    teams: int,
    counters: int,
) -> str:
    values = {
        "GROUP": group,
        "QUERY_ROWS": query_rows,
        "SOURCES": len(sources),
        "REACH": reach,
        "BY_SCORE": int(by_score),
        "TEAMS": teams,
        "COUNTERS": counters,
        "HELD": _HELD,
        "STAGES": _STAGES,
        "SHARED_BYTES": shared_bytes(layouts[0].head_dim, teams, counters),
        "WEIGHTED": int(any(layouts[tier].tier.weights for tier in sources)),
    }
    scale = math.log2(math.e) / math.sqrt(layouts[0].head_dim)
    constants = [
        *cache_constants(layouts, dtype, rotates, has_bias),
        *(f"constexpr int {name} = {value};" for name, value in values.items()),
        f"constexpr float LOGIT_SCALE = {scale!r}f, LOG2_E = {math.log2(math.e)!r}f;",
        "#define EACH_SOURCE(X) " + " ".join(f"X({tier})" for tier in sources),
    ]
    return "\n".join([*constants, read_sources(_SOURCES)])


@lru_cache(maxsize=32)
def _compiled(source: str, teams: int, size: int, device: torch.device) -> Kernel:
    return Module(compile_cubin(source, architecture(device))).kernel("select", _threads(teams), size)


def _threads(teams: int) -> int:
    """Threads of a block: teams that hold 128 rows each."""
    return teams * 32 * _ROWS // (16 * _HELD)


def shared_bytes(dim: int, teams: int, counters: int) -> int:
    """Shared memory of a block: `Shared` of `src/survey.cuh`."""
    keys, stages = 32, _STAGES
    parts = (
        counters * 128 * _ROWS // 2 * 4,
        teams * stages * keys * (2 * dim + 16),
        2 * teams * stages * 8,
        (3 * teams + 2 * _threads(teams) // _ROWS) * _ROWS * 4,
        7 * _ROWS * 4 + _MOST_QUERIES * 4,
        _threads(teams) * 4 + _HEAD_BYTES,
    )
    return -(-sum(parts) // _SHARED_STEP) * _SHARED_STEP


def select(state: CacheState, slot: int, rule: SelectionRule, longest: int | None = None) -> Selection:
    """Which candidates of the request in `slot` its last queries keep, for all layers and heads; the semantics of
    `siftkv.policies.hardkv.selection.vote` and `capped` in rank mode.

    Softmax runs over sinks, window and `rule.sources`: they name every tier in which the request has tokens.
    longest: the most candidates that a head can have (what is known of the request's length); None = what its page
        table can hold. Candidates beyond are not looked at, and `rewrite` keeps them.
    Votes are added to those stored beside the tokens and, but for "accumulated", scores become mean attention of these
    queries. Under a budget tokens rank by (stored votes, mean attention).

    A row's count comes from a histogram of its logits, b = 16 buckets an octave ("snapkv": 8). It takes in all that the
    exact set for p needs, and at most the exact set for p / (p + (1 - p) 2^(-2/b)) (0.908 for 0.9; "snapkv" 0.915) and
    the tokens within a bucket of its weakest, or within an octave (two) where logits have such a gap. "snapkv" and
    "accumulated" also take in what is in one bucket with, or has the same score as, the last that counts; "snapkv" what
    a neighbour raises 13 octaves above the row's weakest. Heads of more than 65,535 tokens, and requests without
    queries, keep everything.

    Nothing is read by the host; the current stream is used. Raises FormatError for a rule that it does not serve
    (`selects`).
    """
    if not selects(state, rule):
        raise FormatError(
            f"the GPU selection serves {', '.join(METRICS)} by union with a ring of queries, positions and head_dim up "
            f"to {_MOST_DIM} where shared memory suffices, "
            f"not metric={rule.metric}, union={rule.union}, pool={rule.pool}"
        )
    held = CacheKernels.of(state)
    layers, heads = state.lengths.shape[1:3]
    kernels: dict[tuple[object, ...], Kernel] = state.scratch.setdefault("cuda_select", {})
    key = (rule.sources, *_kind(rule))
    if key not in kernels:
        teams, counters = _shape(state, rule) or _SHAPES[0]
        size = shared_bytes(state.window_k.shape[-1], teams, counters)
        kernels[key] = _compiled(select_source(state, rule), teams, size, state.pages.device)
    room = state.width * max(state.layouts[tier].tokens for tier in rule.sources) if longest is None else longest

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=state.pages.device)

    found = Selection(
        keep=torch.zeros(layers, heads, room, dtype=torch.uint8, device=state.pages.device),
        kept=empty(layers, heads, dtype=torch.int32),
        mass=empty(layers, heads),
    )
    tally = torch.zeros(layers, heads, room, dtype=torch.int64, device=state.pages.device)
    given = {"queries": state.queries, "keep": found.keep, "kept": found.kept, "covered": found.mass, "tally": tally}
    arguments = _Select(held.arguments, *(given[name].data_ptr() for name in _POINTERS))
    arguments.slot, arguments.columns, arguments.budget = slot, room, min(rule.budget, 2**31 - 1)
    arguments.p = rule.p
    kernels[key].launch((layers * heads, 1), arguments)
    return found
