"""Decode steps that overlap: while the GPU computes one, the host takes in what the one before it gave."""

from __future__ import annotations

from dataclasses import dataclass

from siftkv.engine.concerned import Concerned
from siftkv.engine.graphs import Landing
from siftkv.engine.sequence import Sequence


@dataclass(frozen=True)
class Flight:
    """A greedy decode step that was launched and not yet taken in."""

    sequences: list[Sequence]
    landing: Landing


def flies(sequence: Sequence) -> bool:
    """Whether a sequence's next token is the likeliest one whatever the host knows: a step need not wait for it."""
    params = sequence.params
    simple = params.greedy and not params.adjusts and params.logprobs is None and params.min_tokens == 0
    captured = sequence.cascade is None or not sequence.cascade.eager
    return simple and captured and sequence.fed == len(sequence.output_ids) - 1


def moved_pages(sequences: list[Sequence], head_slots: int, ahead: int = 0) -> int:
    """Pages that triggers before the next step, and that step because of them, can take at most beyond what requests
    need as they stand. ahead: tokens that are on their way.
    """
    moving = 0
    for sequence in sequences:
        try:
            moving += sequence.cascade is not None and sequence.cascade.moves(sequence.seen + ahead)
        except Exception as error:
            raise Concerned(sequence) from error
    return 2 * head_slots * moving


def most_pages(sequences: list[Sequence], head_slots: int) -> int:
    """Pages that one step can take at most, known without asking the device."""
    return sum(head_slots * (1 + s.policy.rule.catch_up) for s in sequences)
