"""Teacher forcing through the real decode path: given tokens are fed one by one, as if they had been generated, and
every distribution is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from siftkv.engine.engine import Engine
from siftkv.engine.outputs import KVReport
from siftkv.engine.report import kv_report
from siftkv.errors import OutOfPages, RequestError
from siftkv.policies import Policy


@dataclass(frozen=True)
class ForcedRow:
    """One request: its prompt is prefilled and sifted, then `forced_ids` are fed one a step."""

    prompt_ids: SequenceOf[int]
    forced_ids: SequenceOf[int]
    policy: Policy


class ForcedRun:
    """Runs rows side by side. Iterate to get, for each step, the logits fp32 `[B, vocab]` that follow the token just
    fed; then read `reports`.

    All rows feed the same number of tokens. Rows may differ in prompt, tokens and policy. Pages are given back when the
    iteration ends, however it ends. Raises RequestError for rows that do not fit the context, OutOfPages when the pool
    is too small for all rows at once.
    """

    def __init__(self, engine: Engine, rows: SequenceOf[ForcedRow]) -> None:
        self.engine = engine
        self.rows = list(rows)
        self.steps = len(self.rows[0].forced_ids) if self.rows else 0
        self.reports: list[KVReport] = []
        """What each row's cache held after the last step."""
        for row in self.rows:
            if len(row.forced_ids) != self.steps:
                raise RequestError("all rows must feed the same number of tokens")
            engine.check_prompt([*row.prompt_ids, *row.forced_ids])

    def __iter__(self) -> Iterator[Tensor]:
        cache, runner = self.engine.cache, self.engine.runner
        slots: list[int] = []
        bound = [self.engine.bind(row.policy) for row in self.rows]
        try:
            for row, policy in zip(self.rows, bound, strict=True):
                slots.append(cache.admit(policy.rule))
                _, [failure] = runner.prefill([list(row.prompt_ids)], [slots[-1]], [policy])
                if failure is not None:
                    raise failure
            slot_tensor = cache.state.seen.new_tensor(slots)
            for step in range(self.steps):
                if cache.step_page_bound(slot_tensor) > cache.free_pages:
                    raise OutOfPages(
                        f"the pool of {cache.spec.num_pages} pages is full after {step} tokens: "
                        "raise kv_cache_memory_bytes"
                    )
                logits, _ = runner.decode([row.forced_ids[step] for row in self.rows], slots)
                yield logits
            self.reports = [kv_report(cache, s, p.name) for s, p in zip(slots, bound, strict=True)]
        finally:
            cache.release(slots)
