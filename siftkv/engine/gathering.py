"""When prompts that could start wait for others: a pass over one prompt keeps a GPU hardly shorter than one over three.

Its kernels are launched one by one, which takes the host longer than a short prompt takes the GPU, and steps that
overlapped are broken off for it. Where a pool is full and requests wait, one starts each time that another ends: then
there is a pass every few steps, and more time goes to passes than to steps.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate, islice

from siftkv.engine.sequence import Sequence

_PART = 8
"""Of what runs, one in so many is what a pass is worth starting for: a sixteenth of the slots is idle on average."""
_FEW, _PART_OF_FEW = 4, 4
"""Up to so many prompts one in fewer: they are what a pass hardly takes longer for."""
_PATIENCE = 32
"""Decode steps for which prompts are held back at most: where answers are long, few end meanwhile, and few are idle."""


class Gathering:
    """Holds back prompts beside running requests until enough of them can start together.

    active: whether a pass costs much whatever it computes. pass_tokens: prompt tokens of a pass at most.
    """

    def __init__(self, active: bool, pass_tokens: int) -> None:
        self._active = active
        self._pass_tokens = pass_tokens
        self._steps = 0

    def wanted(self, waiting: SequenceOf[Sequence], running: int) -> int:
        """How many of those that wait must be able to start together for any to start: no more than half of them, or
        than a pass takes, and at least one. Who is more urgent than the others, or was preempted, is not held back, and
        nobody for more steps than the own answer may have.
        """
        worth = max(running // _PART, min(_FEW, running // _PART_OF_FEW))
        count = min(-(-len(waiting) // 2), worth)
        if not self._active or count <= 1:
            return 1
        first, last = waiting[0], waiting[count - 1]
        if self._steps >= min(_PATIENCE, first.max_tokens):
            return 1
        if first.prefill_failures or first.output_ids or first.params.priority < last.params.priority:
            return 1
        ends = accumulate(len(s.prompt_ids) for s in islice(waiting, count))
        return max(1, sum(end <= self._pass_tokens for end in ends))

    def started(self) -> None:
        """Prompts were started."""
        self._steps = 0

    def stepped(self) -> None:
        """A decode step comes before any other prompt."""
        self._steps += 1
