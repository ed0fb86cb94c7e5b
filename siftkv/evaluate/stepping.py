"""Requests stepped by hand through the real prompt and decode paths: the caller says which token each feeds next."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from siftkv.cache.recovery import discard
from siftkv.engine.cascade import cascade_of, run_due
from siftkv.engine.engine import Engine
from siftkv.engine.outputs import KVReport
from siftkv.engine.report import kv_report
from siftkv.errors import NumericsError, OutOfPages
from siftkv.policies import Policy

Choose = Callable[[list[int], Tensor], SequenceOf[int | None]]
"""`choose(rows, logits)`: rows that still run (ascending) and the logits fp32 `[len(rows), vocab]` after what each has
seen; returns the token that each feeds next, None where it ends.
"""


@dataclass(frozen=True)
class SteppedRow:
    """One request: `prompt_ids` are prefilled and sifted at once, the rest is fed as `choose` says."""

    prompt_ids: SequenceOf[int]
    policy: Policy


def step_rows(engine: Engine, rows: SequenceOf[SteppedRow], choose: Choose) -> list[KVReport]:
    """Run rows side by side until each has ended; what each one's cache held at its end.

    Pages are given back, however the run ends. The caller keeps rows inside the context. Raises RequestError for a
    prompt that cannot be run, OutOfPages when the pool is too small for all rows at once, NumericsError for keys or
    values that are not finite.
    """
    cache = engine.cache
    slots: dict[int, int] = {}
    reports: dict[int, KVReport] = {}
    bound = [engine.bind(row.policy) for row in rows]
    cascades = [cascade_of(policy, cache.spec, row.prompt_ids) for policy, row in zip(bound, rows, strict=True)]
    feed: dict[int, int] = {}
    fed = 0  # all rows start together
    try:
        for i, row in enumerate(rows):
            engine.check_prompt(list(row.prompt_ids))
            slots[i] = cache.admit(bound[i].rule)
            logits, [failure] = engine.runner.prefill([list(row.prompt_ids)], [slots[i]], [bound[i]])
            if failure is not None:
                raise failure
            feed |= _chosen(choose, [i], logits)
        while live := sorted(feed):
            for i in set(slots) - set(live):
                reports[i] = kv_report(cache, slots[i], bound[i].name)
                cache.release([slots.pop(i)])
            own = [slots[i] for i in live]
            run_due(cache, [(cascades[i], slots[i], len(rows[i].prompt_ids) + fed) for i in live])
            if cache.step_page_bound(cache.state.seen.new_tensor(own)) > cache.free_pages:
                raise OutOfPages(f"the pool of {cache.spec.num_pages} pages is full: run fewer requests in a batch")
            logits, finite = engine.runner.decode([feed[i] for i in live], own)
            if not bool(finite.all()):
                raise NumericsError("NaN or infinity in the keys or values of a token that was fed")
            fed += 1
            feed = _chosen(choose, live, logits)
        reports |= {i: kv_report(cache, slot, bound[i].name) for i, slot in slots.items()}
    finally:
        discard(cache, list(slots.values()))  # an error may have come in the middle of a step
    return [reports[i] for i in range(len(rows))]


def _chosen(choose: Choose, rows: list[int], logits: Tensor) -> dict[int, int]:
    tokens = zip(rows, choose(rows, logits), strict=True)
    return {row: token for row, token in tokens if token is not None}


class Script:
    """A `choose` that feeds each row's script first, then what is likeliest, until an end token or a row's limit.

    scripts: tokens to feed, a list a row. limits: tokens that each row then generates at most. ends: token ids.
    generated: what each row generated, end token included.
    """

    def __init__(self, scripts: SequenceOf[SequenceOf[int]], limits: SequenceOf[int], ends: SequenceOf[int]) -> None:
        self._left = [list(reversed(script)) for script in scripts]
        self._limits = limits
        self._ends = set(ends)
        self.generated: list[list[int]] = [[] for _ in scripts]

    def __call__(self, rows: list[int], logits: Tensor) -> list[int | None]:
        likeliest = logits.argmax(-1).tolist()
        return [self._next(row, token) for row, token in zip(rows, likeliest, strict=True)]

    def _next(self, row: int, token: int) -> int | None:
        if self._left[row]:
            return self._left[row].pop()
        own = self.generated[row]
        own.append(token)
        return None if token in self._ends or len(own) >= self._limits[row] else token
