"""How many pages running requests are going to hold, by the lengths of earlier answers and what their prompts took."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable

from siftkv.cache import KVCache
from siftkv.engine.concerned import Concerned
from siftkv.engine.sequence import Sequence

_PAGE_MARGIN = 1.1
_LEARNING_RATE = 0.3
_REMEMBERED_POLICIES = 256
_FIRST_GUESS = 1024
"""Tokens that an answer is expected to have, at most, before any has ended."""
_OUTPUT_RATE = 0.1
_OVERTIME = 4
"""An answer longer than expected is thought to go on for a quarter of what it has."""

Course = tuple[int, float, float]
"""Of a sequence: tokens to come, pages now, and pages a token."""


def peak(courses: Iterable[Course]) -> float:
    """Most pages of all together. All grow steadily, and each returns its pages when it ends, so the fullest moment is
    one at which one of them ends.
    """
    held = growth = most = 0.0
    for left, pages, growth_each in sorted(courses, reverse=True):
        held += pages
        growth += growth_each
        most = max(most, held + growth * left)
    return most


class Forecast:
    """What requests take of a cache: at their start, and at the fullest moment until they end."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._page_share: OrderedDict[Hashable, float] = OrderedDict()
        self._mean_output: float | None = None

    def learn_output(self, sequence: Sequence) -> None:
        """Remember how long an answer was. One that was cut at its limit shows only that answers can be that long."""
        count, known = float(len(sequence.output_ids)), self._mean_output
        if sequence.finish_reason == "length":
            count = max(count, _FIRST_GUESS if known is None else known)
        elif sequence.finish_reason != "stop":
            return
        self._mean_output = count if known is None else known + _OUTPUT_RATE * (count - known)

    def learn_pages(self, sequence: Sequence, pages: int) -> None:
        """Remember what share of the worst case a prompt under this policy really took. What a request had generated
        before it was preempted is fed again later.
        """
        worst = self._worst_pages(sequence, output=0)
        if worst:
            known = self._page_share.pop(sequence.policy.key, 1.0)
            share = pages / worst
            self._page_share[sequence.policy.key] = max(share, known + _LEARNING_RATE * (share - known))
            if len(self._page_share) > _REMEMBERED_POLICIES:
                self._page_share.popitem(last=False)

    def start_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence is expected to take when it starts."""
        try:
            share = 1.0 if sequence.prefill_failures else self._share(sequence)
            return int(self._worst_pages(sequence, len(sequence.output_ids)) * min(1.0, share * _PAGE_MARGIN))
        except Exception as error:
            raise Concerned(sequence) from error

    def peak_pages(self, sequences: Iterable[Sequence]) -> float:
        """Most pages that sequences are expected to hold together."""
        return peak(map(self.course, sequences))

    def course(self, sequence: Sequence) -> Course:
        """What a sequence is expected to do from now on."""
        try:
            done, share = len(sequence.output_ids), self._share(sequence)
            left = max(1, self._expected_output(sequence) - done)
            now = self._worst_pages(sequence, done) * share
            return left, now, (self._worst_pages(sequence, done + left) * share - now) / left
        except Exception as error:
            raise Concerned(sequence) from error

    def _expected_output(self, sequence: Sequence) -> int:
        done = len(sequence.output_ids)
        guess = _FIRST_GUESS if self._mean_output is None else self._mean_output
        return min(sequence.max_tokens, max(int(guess), done + done // _OVERTIME + 1))

    def _share(self, sequence: Sequence) -> float:
        return self._page_share.get(sequence.policy.key, 1.0)

    def _worst_pages(self, sequence: Sequence, output: int) -> int:
        """All tokens in the policy's largest format, and a part page in each of its other tiers, in every head, after
        `output` generated tokens.
        """
        policy = sequence.policy
        tokens = len(sequence.prompt_ids) + output - policy.policy.window - policy.policy.sinks
        if tokens <= 0:
            return 0
        return self.cache.spec.head_slots * (-(-tokens // policy.tokens_a_page) + policy.tiers_used - 1)
