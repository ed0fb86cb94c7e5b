"""Placing what a layer keeps of a batch of prompts: into pages, the window, and a flag for NaN."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from siftkv.kernels.cuda.pages import THREADS, CacheArguments, CacheKernels
from siftkv.kernels.cuda.worklist import aligned_rows, blocks_of, on_device
from siftkv.kernels.prompts import PromptBatch
from siftkv.kernels.state import CacheState

_LISTED, _LOOKED_AT = THREADS["list"], 32
"""Tokens that one block lists, and that one block looks at, as `src/append.cu` says."""

_POINTERS = (
    *("k", "v", "score", "position", "tier", "prompts", "list_work", "look_work", "place_work"),
    *("order", "counts", "shares", "bases", "tickets", "refused", "not_finite"),
)
_STRIDES = (
    *("k_token", "k_head", "v_token", "v_head", "score_head", "score_token"),
    *("position_token", "tier_head", "tier_token"),
)


class _Append(ctypes.Structure):
    """`Append` of `src/append.cu`, field by field."""

    _fields_ = (
        ("cache", CacheArguments),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int) for name in ("layer", "batch", "pieces")),
    )


@dataclass
class _Plan:
    """What is the same in every layer: arguments, grids and work space."""

    held: CacheKernels
    dtype: torch.dtype
    arguments: _Append
    looks: int
    places: int
    kept: tuple[Tensor, ...]

    @staticmethod
    def of(state: CacheState, held: CacheKernels, batch: PromptBatch) -> _Plan:
        device, tiers, heads = batch.table.device, len(state.layouts), held.arguments.heads
        smallest = min(layout.tokens for layout in state.layouts)
        middles = [end - first for first, end in batch.middles]
        pieces = [-(-n // _LISTED) for n in middles]
        records = [
            x
            for slot, start, length, middle, first, count in zip(
                batch.slots, batch.starts, batch.lengths, batch.middles, (0, *accumulate(pieces)), pieces, strict=False
            )
            for x in (slot, start, length, *middle, first, count, 0)
        ]
        work = {
            "list_work": blocks_of(pieces),
            "look_work": blocks_of(-(-n // _LOOKED_AT) for n in batch.lengths),
            # A tier may begin and end within a page.
            "place_work": blocks_of(n // smallest + 2 * tiers if n else 0 for n in middles),
        }
        tables, addresses = on_device({"prompts": records} | work, device)
        columns = sum(pieces) * heads * tiers
        kept = {
            "order": torch.empty(columns * _LISTED, dtype=torch.int16, device=device),
            "counts": torch.empty(columns, dtype=torch.int32, device=device),
            "shares": torch.empty(len(pieces) * heads * tiers, 4, dtype=torch.int32, device=device),
            "bases": torch.empty(len(pieces), dtype=torch.int64, device=device),
            "tickets": held.buffer("tickets", 1, torch.int32, zero=True),
            "refused": held.refused,
        }
        given = addresses | {name: tensor.data_ptr() for name, tensor in kept.items()}
        arguments = _Append(held.arguments, *(given.get(name) for name in _POINTERS))
        arguments.batch, arguments.pieces = len(pieces), sum(pieces)
        looks, places = (len(work[name]) // 2 for name in ("look_work", "place_work"))
        return _Plan(held, state.window_k.dtype, arguments, looks, places, (tables, *kept.values()))


def store_prompts(
    state: CacheState, layer: int, batch: PromptBatch, k: Tensor, v: Tensor, score: Tensor, tier: Tensor
) -> None:
    """Keep one layer of a batch of prompts, whose slots are distinct: k, v `[T, H, D]` plain keys, score fp32 `[H, T]`,
    tier int8 `[H, T]` (-1 = dropped; what it says of tokens outside the middles is ignored).

    Tokens outside the middles are written to the window. Those inside are appended to their tiers, prompt by prompt in
    order, with the same result as `append_tokens`. A prompt that finds too few pages keeps none of its middle, which
    `refused_layers` counts, and leaves them to those behind it. `state.not_finite` is set for prompts with NaN or
    infinity. Nothing is read by the host. Work space is kept with the batch, so calls on one batch belong on one
    stream.
    """
    plan = _plan(state, batch)
    kept = _describe(plan, layer, k, v, score)
    tier = tier if tier.dtype == torch.int8 else tier.to(torch.int8)
    a = plan.arguments
    a.position, a.not_finite = None, state.not_finite.data_ptr()
    a.tier = tier.data_ptr()
    a.tier_head, a.tier_token = tier.stride()
    _launch(plan, plan.looks)
    del kept, tier


def append_tokens(
    state: CacheState, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor, tier: Tensor
) -> None:
    """Append tokens to the tiers of one layer, in the order given, as `siftkv.kernels.reference.append_tokens` does:
    k, v `[n, H, D]` plain keys, score fp32 `[H, n]`, position int64 `[n]`, tier int8 `[H, n]` (-1 = dropped).

    Nothing is read by the host. Where the free pages do not suffice nothing is kept, and `refused_layers` counts that.
    """
    if not len(k):
        return
    plan = _plan(state, _one_prompt(slot, len(k), len(k), k.device))
    kept, tier = _describe(plan, layer, k, v, score), tier.to(torch.int8)
    a = plan.arguments
    a.position, a.position_token, a.not_finite = position.data_ptr(), position.stride(0), None
    a.tier = tier.data_ptr()
    a.tier_head, a.tier_token = tier.stride()
    _launch(plan, 0)
    del kept, tier


def write_window(
    state: CacheState, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor
) -> None:
    """Put tokens into the window: k, v `[n, H, D]`, score fp32 `[H, n]`, position int64 `[n]` (sinks or the most recent
    ones).
    """
    if not len(k):
        return
    plan = _plan(state, _one_prompt(slot, len(k), 0, k.device))
    kept = _describe(plan, layer, k, v, score)
    a = plan.arguments
    a.position, a.position_token, a.not_finite = position.data_ptr(), position.stride(0), None
    _launch(plan, plan.looks)
    del kept


def refused_layers(state: CacheState) -> Tensor:
    """How many times a prompt of a slot kept nothing of a layer because free pages were short, int32 `[S]` on the
    device, since each slot was last released.
    """
    return CacheKernels.of(state).refused


@lru_cache(maxsize=8)
def _one_prompt(slot: int, tokens: int, middle: int, device: torch.device) -> PromptBatch:
    """The same in every layer."""
    return PromptBatch.of([slot], [tokens], [(0, middle)], [None], device)


def _plan(state: CacheState, batch: PromptBatch) -> _Plan:
    held = CacheKernels.of(state)
    plan: _Plan | None = batch.scratch.get("append")
    if plan is None or plan.held is not held:
        plan = batch.scratch["append"] = _Plan.of(state, held, batch)
    return plan


def _describe(plan: _Plan, layer: int, k: Tensor, v: Tensor, score: Tensor) -> tuple[Tensor, ...]:
    """Tell the arguments about tokens; returns the tensors that they point into."""
    dtype, a = plan.dtype, plan.arguments
    k = aligned_rows(k if k.dtype == dtype else k.to(dtype))
    v = aligned_rows(v if v.dtype == dtype else v.to(dtype))
    score = score if score.dtype == torch.float32 else score.float()
    a.layer, a.k, a.v, a.score = layer, k.data_ptr(), v.data_ptr(), score.data_ptr()
    a.k_token, a.k_head, _ = k.stride()
    a.v_token, a.v_head, _ = v.stride()
    a.score_head, a.score_token = score.stride()
    return k, v, score


def _launch(plan: _Plan, looks: int) -> None:
    a, kernels = plan.arguments, plan.held.kernels
    if a.pieces or looks:
        kernels["list"].launch((a.pieces * a.cache.heads + looks, 1), a)
    if plan.places:
        kernels["place"].launch((plan.places, a.cache.heads), a, early=True)
