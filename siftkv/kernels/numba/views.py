"""Flat NumPy views of a `CacheState`, derived once and kept in its scratch: what compiled kernels take instead of
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siftkv.formats import DENSE_DTYPES, PageLayout
from siftkv.kernels.state import CacheState

KINDS = {name: index for index, name in enumerate(DENSE_DTYPES)}
QUANTISED = len(KINDS)
"""The kind of a quantised tier; dense tiers and the window have the index of their element type in `DENSE_DTYPES`."""

BF16, FP16, FP32 = KINDS["bf16"], KINDS["fp16"], KINDS["fp32"]

# Columns of the table of layouts.
KIND, KEY_BITS, VALUE_BITS, KEY_GROUPS, VALUE_GROUPS, COMPACT, TOKENS, KEY_ROW, VALUE_ROW = range(9)
SCORES, POSITIONS, VOTES, WEIGHTS = range(9, 13)
KEY_AT, KEY_META_AT, VALUE_AT, VALUE_META_AT, SCORE_AT, POSITION_AT, VOTE_AT, WEIGHT_AT, PAGE_BYTES = range(13, 22)

# Columns of `sizes`.
LAYERS, HEADS, DIM, WINDOW_ROWS, SINK_ROWS, WINDOW_KIND, WIDTH, NUM_PAGES = range(8)


def layout_row(layout: PageLayout) -> list[int]:
    """One row of the table of layouts."""
    fmt = layout.format
    kind = KINDS[fmt.name] if fmt.dense else QUANTISED
    groups = [fmt.key_bits, fmt.value_bits, fmt.key_groups, fmt.value_groups, int(fmt.compact)]
    tier, rows = layout.tier, (layout.tokens, layout.key_row, layout.value_row)
    state = [int(x) for x in (tier.scores, tier.positions, tier.votes, tier.weights)]
    return [kind, *groups, *rows, *state, *layout.offsets, layout.page_bytes]


def words(x: Tensor) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """A contiguous tensor's bytes as a flat uint16 array (a view)."""
    return x.view(-1).view(torch.uint16).numpy()


def flat(x: Tensor) -> Tensor:
    """The memory that a strided tensor spans, from its first element on (a view); empty for an empty one."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((span if x.numel() else 0,), (1,))


def rows_of(x: Tensor) -> tuple[int, tuple[Any, ...]]:
    """Keys or values `[n, H, D]` as compiled kernels read them: the kind of their elements, and flat 16-bit words, flat
    fp32 (empty for 16-bit types), and the strides of tokens and heads in elements. A view stays a view.
    """
    if x.dtype not in DENSE_DTYPES.values():
        x = x.float()
    if x.stride(-1) != 1:
        x = x.contiguous()
    kind, held = list(DENSE_DTYPES.values()).index(x.dtype), flat(x)
    floats = held if kind == FP32 else held.new_empty(0, dtype=torch.float32)
    return kind, (held.view(torch.uint16).numpy(), floats.numpy(), x.stride(0), x.stride(1))


@dataclass
class Views:
    """Views of one `CacheState`, grouped as the compiled kernels take them. `pool` and `window` share memory with the
    state.

    pool: pages as bytes, 16-bit words, int32 and fp32 (all flat), page table flat int32, lengths flat int32, skipped
    pages uint8, flat as the page table or empty.
    window: keys as 16-bit words and fp32, values as 16-bit words and fp32 (all flat), score flat fp32, seen, start,
    sinks int64.
    rules: window, refresh, catch_up int64, alpha flat fp32, cap flat int32, cap_share flat fp32, horizon int64.
    rotary: cos, sin `[max_len, D/2]` fp32, bias `[L, H, D]` fp32, pairs `[L, H, P]` int32, rank `[L, H]` int32.
    ring: free_ring int32, counters int64.
    work: buffers by name. spaces: the threads' own buffers in attention, by number of threads and size of the group.
    """

    owner: int
    sizes: np.ndarray[Any, Any]
    layouts: np.ndarray[Any, Any]
    pool: tuple[np.ndarray[Any, Any], ...]
    window: tuple[np.ndarray[Any, Any], ...]
    rules: tuple[np.ndarray[Any, Any], ...]
    rotary: tuple[np.ndarray[Any, Any], ...]
    ring: tuple[np.ndarray[Any, Any], ...]
    work: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    spaces: dict[tuple[int, int], tuple[np.ndarray[Any, Any], ...]] = field(default_factory=dict)

    def buffer(self, name: str, size: int, dtype: type = np.float32) -> np.ndarray[Any, Any]:
        """Flat work space of at least `size` elements, zero at first, kept between calls."""
        held = self.work.get(name)
        if held is None or held.size < size:
            held = self.work[name] = np.zeros(max(size, 16) * 5 // 4, dtype)
        return held


def views(state: CacheState) -> Views:
    """The views of a state: built at first use, and again if a tensor was replaced by another one."""
    held = state.scratch.get("numba")
    pool = (state.pages, state.page_table, state.lengths, state.window_k, state.window_score, state.page_skip)
    rules = (state.seen, *_rules(state), state.conditioning.bias)
    owner = hash(tuple(x.data_ptr() for x in (*pool, *rules)))
    if isinstance(held, Views) and held.owner == owner:
        return held
    made = state.scratch["numba"] = _views(state, owner)
    return made


def _rules(state: CacheState) -> tuple[Tensor, ...]:
    of_slots = (state.window, state.refresh, state.catch_up)
    return (*of_slots, state.alpha, state.cap, state.cap_share, state.horizon)


def _views(state: CacheState, owner: int) -> Views:
    c, pages = state.conditioning, state.pages.view(-1)
    _, layers, heads, rows, dim = state.window_k.shape
    kind = list(DENSE_DTYPES.values()).index(state.window_k.dtype)
    wide = [x.view(-1).view(torch.float32).numpy() for x in (state.window_k, state.window_v)]
    numbers = [layers, heads, dim, rows, state.sink_rows, kind, state.width, state.num_pages]
    typed = (pages.view(t).numpy() for t in (torch.uint8, torch.uint16, torch.int32, torch.float32))
    rotary = tuple(x.contiguous().numpy() for x in (c.cos, c.sin, c.bias, c.pairs, c.rank))
    steps = [x.numpy() for x in (state.seen, state.window_start, state.sinks)]
    return Views(
        owner,
        np.array(numbers, np.int64),
        np.array([layout_row(x) for x in state.layouts], np.int64).reshape(-1, PAGE_BYTES + 1),
        (*typed, *(x.view(-1).numpy() for x in (state.page_table, state.lengths, state.page_skip))),
        (words(state.window_k), wide[0], words(state.window_v), wide[1], state.window_score.view(-1).numpy(), *steps),
        tuple(x.view(-1).numpy() for x in _rules(state)),
        rotary,
        (state.free_ring.numpy(), state.counters.numpy()),
    )
