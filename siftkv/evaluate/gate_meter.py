"""Divergence of many requests at once: several windows of text side by side, each with a full cache of its own.

A step of a batch is a handful of operations on the logits' device, however many windows it holds, and nothing waits for
the device before the last step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from siftkv.errors import NumericsError, RequestError
from siftkv.evaluate.divergence import Positions


class GroupMeter:
    """Collects one position after another for groups of rows, the first of each a full cache, the others candidates.

    Figures are those of a `DivergenceMeter` a group.

    Example:
        >>> meter = GroupMeter([3, 2])  # a full cache and two candidates, then another and one
        >>> for logits, targets in zip(run, texts):  # logits [5, vocab], a token a group
        ...     meter.update(logits, targets)
        >>> [positions.kl.mean() for positions in meter.positions()[0]]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: rows of each group, its full cache included. Raises RequestError unless each is 2 or more."""
        if not sizes or min(sizes) < 2:
            raise RequestError("each group needs a row of the full cache and a candidate")
        self._sizes = list(sizes)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._reference = [start for start, size in zip(starts, sizes) for _ in range(size)]  # [rows]
        self._figures: list[Tensor] = []  # fp64 [3, rows] a position: kl, agree, nll

    def update(self, logits: Tensor, next_tokens: Sequence[int]) -> None:
        """Add a position: logits `[rows, vocab]`, groups end to end, and the token that follows in each group.

        Log-softmax is taken in float64. A logit of -inf in the full cache (a banned token) adds nothing to KL.
        Raises RequestError when shapes do not fit or a token is outside the vocabulary.
        """
        if logits.shape[0] != len(self._reference) or len(next_tokens) != len(self._sizes):
            raise RequestError(
                f"logits of {logits.shape[0]} rows, {len(next_tokens)} tokens: groups have {self._sizes} rows"
            )
        if not all(0 <= token < logits.shape[1] for token in next_tokens):
            raise RequestError(f"a token id is outside the vocabulary of {logits.shape[1]}")
        device = logits.device
        tokens = [token for token, size in zip(next_tokens, self._sizes, strict=True) for _ in range(size)]
        target, reference = (torch.tensor(x).to(device, non_blocking=True) for x in (tokens, self._reference))
        q = logits.double().log_softmax(-1)  # [rows, vocab]
        p = q[reference]
        kl = torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(-1).clamp_min(0.0)
        best = q.argmax(-1)
        nll = -q.gather(1, target[:, None])[:, 0]
        self._figures.append(torch.stack([kl, (best == best[reference]).double(), nll]))

    def positions(self) -> list[list[Positions]]:
        """Every position's figures by group, one set a candidate.

        Raises RequestError before the first `update`, NumericsError where logits were NaN.
        """
        if not self._figures:
            raise RequestError("nothing was compared yet: feed at least one position")
        kl, agree, nll = torch.stack(self._figures, -1).cpu()  # [rows, positions] each
        if bool(nll.isnan().any()):
            first = int(nll.isnan().any(0).nonzero()[0])
            raise NumericsError(f"NaN in the logits of position {first}")
        found, start = [], 0
        for size in self._sizes:
            own = range(start + 1, start + size)
            found.append([Positions(kl[i], agree[i] > 0, nll[i], nll[start]) for i in own])
            start += size
        return found
