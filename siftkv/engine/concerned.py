"""Whose an error is that comes up while many requests are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from siftkv.engine.sequence import Sequence


class Concerned(Exception):
    """Carries an error, its `__cause__`, to `siftkv.engine.faults`, with the requests that it concerns."""

    def __init__(self, *sequences: Sequence) -> None:
        super().__init__(", ".join(s.request_id for s in sequences))
        self.sequences = sequences


@contextmanager
def concerning(*sequences: Sequence) -> Iterator[None]:
    """Errors inside are theirs, unless they are known to be somebody's."""
    try:
        yield
    except Concerned:
        raise
    except Exception as error:
        raise Concerned(*sequences) from error
