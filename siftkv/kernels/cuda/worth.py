"""Tokens of a batch of prompts ranked by worth and placed in tiers: `siftkv.kernels.ranking` on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from siftkv.kernels.cuda.driver import Kernel
from siftkv.kernels.cuda.importance import FINISH_THREADS, THREADS, Importance, Plan, check_measured, compiled
from siftkv.kernels.cuda.importance import source as measuring_source
from siftkv.kernels.cuda.pages import read_sources
from siftkv.kernels.cuda.worklist import aligned_rows, blocks_of, on_device
from siftkv.kernels.prompts import PromptBatch
from siftkv.kernels.ranking import (
    ALMOST,
    LEAST_DISTANT,
    LEVELS,
    LEVELS_AN_OCTAVE,
    LOWEST_OCTAVE,
    MOST_POOLED,
    SCALES,
    SOON,
    TierSizes,
    WorthRule,
    asked_rows,
)

_RANK_THREADS, _TIERS = 1024, 3
_OWN_THREADS = {"weigh": FINISH_THREADS, **dict.fromkeys(("levels", "share_out", "place"), _RANK_THREADS)}

Kernels = dict[str, Kernel]

_POINTERS = (
    *("v", "ranked", "weigh_work", "partial", "worth", "norm", "above", "factor", "prior", "score", "bounds", "tier"),
    *("room", "held", "share"),
)


class _Sizes(ctypes.Structure):
    """`Sizes` of `src/worth.cu`, field by field."""

    _fields_ = (
        ("shift", ctypes.c_int * _TIERS),
        *((name, ctypes.c_float * _TIERS) for name in ("step", "a_page", "even")),
        ("ahead", ctypes.c_float),
    )


class _Worth(ctypes.Structure):
    """`Worth` of `src/worth.cu`, field by field."""

    _fields_ = (
        ("asked", Importance),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("v_token", "v_head", "score_head")),
        *((name, ctypes.c_float) for name in ("distant", "later", "unseen")),
        *((name, ctypes.c_int) for name in ("width", "young", "pool")),
        ("sizes", _Sizes),
    )


@dataclass
class _Plan:
    """What is the same in every layer: how attention is measured, arguments, grids and work space."""

    measured: Plan
    arguments: _Worth
    grids: dict[str, tuple[int, int]]
    space: dict[str, Tensor]
    tables: Tensor

    @staticmethod
    def of(
        batch: PromptBatch,
        prompts: range,
        rule: WorthRule,
        width: int,
        q: Tensor,
        k: Tensor,
        kernels: dict[str, Kernel],
    ) -> _Plan:
        (tokens, heads, dim), device, group = k.shape, k.device, q.shape[1] // k.shape[1]
        blocks = [-(-batch.lengths[b] // FINISH_THREADS) for b in prompts]
        records = [
            x
            for b, first, count in zip(prompts, (0, *accumulate(blocks)), blocks, strict=False)
            for x in (batch.starts[b], batch.lengths[b], *batch.middles[b], first, count, 0, 0)
        ]
        tables, addresses = on_device({"ranked": records, "weigh_work": blocks_of(blocks)}, device)
        lags = [0, rule.reach - 1] * len(prompts)
        measured = Plan.of(_asked(batch, prompts, rule), heads, group, dim, kernels, lags)
        measured.arguments.tokens = tokens
        space = {
            "partial": torch.empty(sum(blocks) * heads, 2, device=device),
            **{name: torch.empty(heads, tokens, device=device) for name in ("worth", "norm")},
            "above": torch.empty(len(prompts), heads, width, device=device),
            **{name: torch.empty(len(prompts), heads, device=device) for name in ("factor", "prior")},
            **{name: torch.empty(len(prompts), heads, _TIERS, device=device) for name in ("held", "share")},
        }
        arguments = _Worth(measured.arguments)
        for name, address in (addresses | {name: x.data_ptr() for name, x in space.items()}).items():
            setattr(arguments, name, address)
        arguments.distant, arguments.later, arguments.unseen = rule.distant, rule.later, rule.prior
        arguments.width, arguments.young, arguments.pool = width, rule.young, rule.pool
        grids = {"weigh": (sum(blocks), heads)} | dict.fromkeys(("levels", "place"), (len(prompts), heads))
        grids["share_out"] = (len(prompts), 1)
        return _Plan(measured, arguments, grids, space, tables)

    def launch(self, name: str, early: bool = False) -> None:
        self.measured.kernels[name].launch(self.grids[name], self.arguments, early)


@dataclass(frozen=True)
class Ranked:
    """`siftkv.kernels.ranking.Ranking` until the next layer is ranked.

    span: of the prompts in the flat batch. score: fp32 `[H, T]`, of the whole batch.
    """

    plan: _Plan
    span: slice
    score: Tensor

    @property
    def above(self) -> Tensor:
        return self.plan.space["above"]

    def share_out(self, sizes: TierSizes, room: Tensor) -> tuple[Tensor, Tensor]:
        """As `Ranking.share_out` says; the results are valid until the next layer is ranked."""
        plan, room = self.plan, room.contiguous()
        assert room.dtype == torch.float32
        assert room.numel() == 8 * len(self.above)
        a = plan.arguments
        a.sizes = _Sizes(*(getattr(sizes, field[0]) for field in _Sizes._fields_))
        a.room = room.data_ptr()
        plan.launch("share_out", early=True)
        return plan.space["held"], plan.space["share"]

    def place(self, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """As `Ranking.place` says; scores are written over those that were measured."""
        bounds, plan = bounds.contiguous(), self.plan
        assert bounds.dtype == torch.float32
        assert bounds.shape == (*self.above.shape[:2], _TIERS)
        tier = torch.empty(self.score.shape, dtype=torch.int8, device=self.score.device)
        plan.arguments.bounds, plan.arguments.tier = bounds.data_ptr(), tier.data_ptr()
        plan.launch("place", early=True)
        return tier[:, self.span], self.score[:, self.span]


def rank_prompts(
    batch: PromptBatch,
    prompts: range,
    rule: WorthRule,
    width: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor | None,
    score: Tensor,
) -> Ranked:
    """Rank the tokens of neighbouring prompts of a batch; what a prompt is found to be worth is the same, to the bit,
    alone.

    q `[T, Hq, D]`, k, v `[T, H, D]`, lse fp32 `[Hq, T]` as for `measure_prompts`; score: fp32 `[H, T]`, what that
    returned. Work space is kept with the batch, so calls on one batch belong on one stream, and a layer is placed
    before the next one is ranked. Raises FormatError as `measure_prompts` does.
    """
    check_measured(q, k)
    assert score.stride(1) == 1
    plan = _plan(batch, prompts, rule, width, q, k)
    v, a = aligned_rows(v), plan.arguments
    a.v, a.score, a.score_head = v.data_ptr(), score.data_ptr(), score.stride(0)
    a.v_token, a.v_head, _ = v.stride()
    plan.measured.measure(q, k, lse)
    a.asked = plan.measured.arguments
    plan.launch("weigh", early=True)
    plan.launch("levels", early=True)
    span = slice(batch.starts[prompts[0]], batch.starts[prompts[-1]] + batch.lengths[prompts[-1]])
    return Ranked(plan, span, score)


def _plan(batch: PromptBatch, prompts: range, rule: WorthRule, width: int, q: Tensor, k: Tensor) -> _Plan:
    (_, heads, dim), group = k.shape, q.shape[1] // k.shape[1]
    key = ("worth", prompts, rule, width, q.shape[1:], k.shape[1:], k.dtype)
    plan: _Plan | None = batch.scratch.get(key)
    if plan is None:
        kernels = _kernels(k.dtype, dim, group, heads, k.device)
        plan = batch.scratch[key] = _Plan.of(batch, prompts, rule, width, q, k, kernels)
    return plan


def _asked(batch: PromptBatch, prompts: range, rule: WorthRule) -> PromptBatch:
    """Each prompt twice: with its last rows, and with distant ones; at its place in the flat batch."""
    rows = [own for b in prompts for own in _rows(batch.lengths[b], rule)]
    twice = [b for b in prompts for _ in range(2)]
    lengths = [batch.lengths[b] for b in twice]
    measured = [(own, torch.ones(len(own))) for own in rows]
    asked = PromptBatch.of([0] * len(twice), lengths, [(0, 0)] * len(twice), measured, batch.table.device)
    return replace(asked, starts=tuple(batch.starts[b] for b in twice))


def _rows(length: int, rule: WorthRule) -> Iterator[Tensor]:
    yield asked_rows(length, max(0, length - rule.observe), rule.observe)
    yield asked_rows(length, min(rule.reach, length), rule.observe)


def source(dtype: torch.dtype, dim: int, group: int, heads: int) -> str:
    """The whole source, its constants first."""
    constants = [
        f"constexpr int HEADS = {heads}, LEVELS = {LEVELS}, LEAST_DISTANT = {LEAST_DISTANT};",
        f"constexpr int MOST_POOLED = {MOST_POOLED};",
        f"constexpr float LOWEST_OCTAVE = {LOWEST_OCTAVE}, LEVELS_AN_OCTAVE = {LEVELS_AN_OCTAVE};",
        f"constexpr int SCALES = {SCALES};",
        f"constexpr float ALMOST = {ALMOST!r}f, SOON = {SOON!r}f;",
    ]
    return "\n".join([measuring_source(dtype, dim, group, power=2), *constants, read_sources(("worth.cu",))])


@lru_cache(maxsize=16)
def _kernels(dtype: torch.dtype, dim: int, group: int, heads: int, device: torch.device) -> Kernels:
    return compiled(source(dtype, dim, group, heads), THREADS | _OWN_THREADS, device)
