"""The policy step of decoding: plan, coordinate, then move records, all layers and heads of all requests at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from siftkv.kernels.numba import threads
from siftkv.kernels.numba.commit import commit_tiers
from siftkv.kernels.numba.plan import PLAN_COLUMNS, coordinate, plan_heads
from siftkv.kernels.numba.vectors import LANES
from siftkv.kernels.numba.views import KIND, QUANTISED, Views, views
from siftkv.kernels.reference.bookkeeping import note_faults, note_peaks
from siftkv.kernels.state import CacheState


def sift_step(state: CacheState, slots: Tensor, examine: bool = True) -> Tensor:
    """See `siftkv.kernels.reference.sift_step`."""
    held, ids = views(state), slots.contiguous().numpy()
    seen, start, rules = held.window[5], held.window[6], held.rules
    note_faults(state, slots)
    seen[ids] += 1
    leaves = seen[ids] - start[ids] > rules[0][ids]
    done = _cascade(state, held, ids, examine=False) if leaves.any() else np.ones(len(ids), np.bool_)
    start[ids] += leaves & done
    for turn in range(int(rules[2][ids].max()) if examine and len(ids) else 0):
        _cascade(state, held, ids[done & (rules[2][ids] > turn)], examine=True)
    note_peaks(state, slots)
    return torch.from_numpy(done)


def _cascade(state: CacheState, held: Views, slots: Any, examine: bool) -> Any:
    """Plan and carry out one newcomer (`examine` false) or one examination a head slot. Returns bool `[B]`: served."""
    batch, (layers, heads, dim), tiers = len(slots), held.sizes[:3].tolist(), len(held.layouts)
    granted, rows = np.ones(batch, np.bool_), batch * layers * heads
    size = rows * tiers * PLAN_COLUMNS
    plans = held.buffer("plans", size, np.int64)[:size].reshape(batch, layers, heads, tiers, PLAN_COLUMNS)
    workers, progress = threads.workers(batch * layers), np.zeros(2, np.int64)
    rest = (held.sizes, held.layouts, held.pool, held.window, held.rules, plans, progress)
    threads.run(plan_heads, workers, slots, examine, *rest)
    if not coordinate(slots, held.sizes, held.layouts, held.pool, held.ring, plans, granted):
        return granted
    width = dim + LANES
    keys, values = (held.buffer(x, rows * width)[: rows * width].reshape(rows, width) for x in ("keys", "values"))
    carried = (keys, values, held.buffer("scores", rows), held.buffer("positions", rows, np.int64))
    quantised = held.layouts[:, KIND] == QUANTISED
    first = int(quantised.argmax()) if quantised.any() else tiers
    _commit(held, slots, True, 0, first, plans, carried)
    if first == tiers:
        return granted
    if state.conditioning.rotates:
        # The same product of the same shape as the reference's, so that no rounding differs.
        plain = torch.from_numpy(keys)[:, :dim].contiguous().view(batch, layers, heads, dim)
        keys[:, :dim] = (plain @ state.conditioning.rotation).view(rows, dim).numpy()
    _commit(held, slots, False, first, tiers, plans, carried)
    return granted


def _commit(held: Views, slots: Any, leaving: bool, first: int, last: int, plans: Any, carried: Any) -> None:
    workers, width = threads.workers(len(slots) * plans.shape[1]), carried[0].shape[1]
    spare = held.buffer("spare", workers * 3 * width)[: workers * 3 * width].reshape(workers, 3, width)
    state = (held.sizes, held.layouts, held.pool, held.window, held.rotary, held.ring[0])
    threads.run(
        commit_tiers, workers, slots, leaving, first, last, *state, plans, carried, spare, np.zeros(2, np.int64)
    )
