"""What the sampler asks of a grammar: which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class GuideState(Protocol):
    """Where one completion stands in a grammar."""

    def allowed(self, output_ids: Sequence[int], vocab: int) -> Tensor:
        """bool `[vocab]` on the CPU: the tokens that may follow `output_ids`, which only ever grows between calls.

        Nothing is allowed once the grammar cannot go on.
        """

    @property
    def failure(self) -> str | None:
        """Why it cannot, in a few words; None while it can."""


class Guide(Protocol):
    """A compiled grammar, shared by the completions of a request."""

    def start(self) -> GuideState:
        """A completion that has no tokens yet."""
