"""Teacher forcing through the real decode path: given tokens are fed one by one, as if they had been generated, and
every distribution is handed out.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from siftkv.cache.recovery import discard
from siftkv.engine.cascade import Cascade, cascade_of, run_due
from siftkv.engine.engine import Engine
from siftkv.engine.outputs import KVReport
from siftkv.engine.report import kv_report
from siftkv.engine.shared_prompt import prefill_shared
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
        self.slots: list[int] = []
        """Each row's slot in the cache, while the iteration runs."""
        self.cascades: list[Cascade | None] = []
        """Each row's triggers, None under a policy that has none."""
        for row in self.rows:
            if len(row.forced_ids) != self.steps:
                raise RequestError("all rows must feed the same number of tokens")
            if not row.prompt_ids:
                raise RequestError("a row has an empty prompt: give at least one token")
            engine.check_prompt([*row.prompt_ids, *row.forced_ids])

    def __iter__(self) -> Iterator[Tensor]:
        cache, runner = self.engine.cache, self.engine.runner
        slots = self.slots = []
        bound = [self.engine.bind(row.policy) for row in self.rows]
        try:
            pairs = zip(self.rows, bound, strict=True)
            for prompt, group in groupby(pairs, key=lambda pair: list(pair[0].prompt_ids)):
                policies = [policy for _, policy in group]
                slots.extend(cache.admit(policy.rule) for policy in policies)
                prefill_shared(runner, prompt, slots[-len(policies) :], policies)
            self.cascades = [
                cascade_of(policy, cache.spec, row.prompt_ids) for row, policy in zip(self.rows, bound, strict=True)
            ]
            slot_tensor = cache.state.seen.new_tensor(slots)
            for step in range(self.steps):
                seen = [len(row.prompt_ids) + step for row in self.rows]
                run_due(cache, zip(self.cascades, slots, seen, strict=True))
                if cache.step_page_bound(slot_tensor) > cache.free_pages:
                    raise OutOfPages(
                        f"the pool of {cache.spec.num_pages} pages is full after {step} tokens: "
                        "raise kv_cache_memory_bytes"
                    )
                logits, _ = runner.decode([row.forced_ids[step] for row in self.rows], slots)
                yield logits
            self.reports = [kv_report(cache, s, p.name) for s, p in zip(slots, bound, strict=True)]
        finally:
            discard(cache, slots)  # an error may have come in the middle of a step
