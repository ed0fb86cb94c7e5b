"""Prompts laid end to end in one flat batch: what kernels that take all of them at once need to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from siftkv.kernels.state import CacheState

Measured = tuple[Tensor, Tensor]
"""Query rows (int64 `[M]`, ascending, positions within their prompt) and their weights (fp32 `[M]`)."""


@dataclass(frozen=True)
class PromptBatch:
    """`B` prompts; prompt `b` holds the rows `[starts[b], starts[b] + lengths[b])` of a flat batch of `T` tokens.

    slots: request slots. middles: the tokens `[first, end)` of each prompt that leave its window; the others are
        written to it.
    rows, weight: the measured query rows of all prompts, one after another; those of prompt `b` are `[row_starts[b],
        row_starts[b + 1])`, none where its policy needs no scores.
    table: int32 `[B, 8]` on the device: slot, start, length, first of rows, rows, middle's first, middle's end, 0.
    bounds: int32 `[B + 1]` on the device, the starts and the end of all.
    scratch: what a kernel body derives once from the batch for all layers (lists of work, work space).
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    middles: tuple[tuple[int, int], ...]
    rows: Tensor
    weight: Tensor
    row_starts: tuple[int, ...]
    table: Tensor
    bounds: Tensor
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        slots: Sequence[int],
        lengths: Sequence[int],
        middles: Sequence[tuple[int, int]],
        measured: Sequence[Measured | None],
        device: torch.device,
    ) -> PromptBatch:
        """Lay prompts of these lengths end to end; `measured` may lie on the host."""
        counts = [0 if m is None else len(m[0]) for m in measured]
        row_starts = (0, *accumulate(counts))
        bounds = (0, *accumulate(lengths))
        table = [
            [slot, start, length, first_row, rows, first, end, 0]
            for slot, start, length, first_row, rows, (first, end) in zip(
                slots, bounds, lengths, row_starts, counts, middles, strict=False
            )
        ]
        known = [m for m in measured if m is not None]
        rows = torch.cat([m[0] for m in known]) if known else torch.zeros(0, dtype=torch.int64)
        weight = torch.cat([m[1] for m in known]) if known else torch.zeros(0)
        return cls(
            slots=tuple(slots),
            starts=bounds[:-1],
            lengths=tuple(lengths),
            middles=tuple(middles),
            rows=to_device(rows, device),
            weight=to_device(weight, device),
            row_starts=row_starts,
            table=to_device(torch.tensor(table, dtype=torch.int32), device),
            bounds=to_device(torch.tensor(bounds, dtype=torch.int32), device),
        )

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def span(self, prompt: int) -> slice:
        """Rows of a prompt in the flat batch."""
        return slice(self.starts[prompt], self.starts[prompt] + self.lengths[prompt])

    def measured(self, prompt: int) -> Measured:
        """Query rows and weights of a prompt."""
        own = slice(self.row_starts[prompt], self.row_starts[prompt + 1])
        return self.rows[own], self.weight[own]


def measure_one_by_one(
    prompt_importance: Callable[..., Tensor], batch: PromptBatch, q: Tensor, k: Tensor, lse: Tensor | None
) -> Tensor:
    """`measure_prompts` of kernels that know one prompt at a time: q `[T, Hq, D]`, k `[T, H, D]`, lse fp32 `[Hq, T]` to
    fp32 `[H, T]`, zeros where a prompt has no measured rows.
    """
    score = torch.zeros(k.shape[1], len(k), device=k.device)
    for prompt in range(len(batch.slots)):
        span, (rows, weight) = batch.span(prompt), batch.measured(prompt)
        if len(rows):
            own = None if lse is None else lse[:, span]
            score[:, span] = prompt_importance(q[span], k[span], rows, weight, own)
    return score


def store_one_by_one(
    write_window: Callable[..., None],
    append_tokens: Callable[..., None],
    state: CacheState,
    layer: int,
    batch: PromptBatch,
    k: Tensor,
    v: Tensor,
    score: Tensor,
    tier: Tensor,
) -> None:
    """`store_prompts` of kernels that know one prompt at a time: k, v `[T, H, D]`, score fp32, tier int8 `[H, T]`."""
    for prompt, slot in enumerate(batch.slots):
        span, (first, end) = batch.span(prompt), batch.middles[prompt]
        position = torch.arange(batch.lengths[prompt], device=k.device)
        own = (k[span], v[span], score[:, span].t(), tier[:, span].t())
        for part in (slice(0, first), slice(end, None)):
            keys, values, scores, _ = (x[part] for x in own)
            write_window(state, layer, slot, keys, values, scores.t(), position[part])
        keys, values, scores, tiers = (x[first:end] for x in own)
        append_tokens(state, layer, slot, keys, values, scores.t(), position[first:end], tiers.t())


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy that the host does not wait for."""
    if device.type == "cpu" or x.device == device:
        return x
    return x.pin_memory().to(device, non_blocking=True)
