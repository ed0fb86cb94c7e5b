"""How far the next-token distributions of sifted caches are from those of the full cache, fed position by position."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from siftkv.errors import NumericsError, RequestError


@dataclass(frozen=True)
class Divergence:
    """Fidelity of one candidate over `positions` tokens. KL and NLL are in nats per token.

    mean_kl, p90_kl: of KL(full || candidate). worst_decile_kl: its mean over the tenth of positions where it is
    largest, one at least.
    top1_agreement: share of positions where both give the same likeliest token, 0 to 1.
    perplexity_ratio: the candidate's perplexity on the text by that of the full cache; 1 = nothing lost, less is luck.
    reference_nll, candidate_nll: mean negative log-likelihood of the text. kl: KL at each position.
    """

    positions: int
    mean_kl: float
    p90_kl: float
    worst_decile_kl: float
    top1_agreement: float
    perplexity_ratio: float
    reference_nll: float
    candidate_nll: float
    kl: list[float]

    @staticmethod
    def of(positions: Positions) -> Divergence:
        """The figures of one candidate's positions."""
        kl, nll = positions.kl, positions.nll
        reference = float(positions.reference_nll.mean())
        return Divergence(
            positions=len(kl),
            mean_kl=float(kl.mean()),
            p90_kl=float(kl.quantile(0.9)),
            worst_decile_kl=float(kl.topk(math.ceil(len(kl) / 10)).values.mean()),
            top1_agreement=float(positions.agree.double().mean()),
            perplexity_ratio=float(torch.exp(nll.mean() - reference)),
            reference_nll=reference,
            candidate_nll=float(nll.mean()),
            kl=kl.tolist(),
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields, made of JSON types only."""
        return asdict(self)


@dataclass(frozen=True)
class Positions:
    """What was measured at each of P positions of one candidate, from which any statistic follows.

    kl: KL(full || candidate), fp64 `[P]`. agree: whether both give the same likeliest token, bool `[P]`. nll,
    reference_nll: of the text's token, for the candidate and the full cache, fp64 `[P]`. All in nats.
    """

    kl: Tensor
    agree: Tensor
    nll: Tensor
    reference_nll: Tensor


class DivergenceMeter:
    """Collects one position after another for several candidates at a time; keeps a few numbers a position.

    Example:
        >>> meter = DivergenceMeter()
        >>> for logits, target in zip(run, targets):  # logits [1 + R, vocab], the full cache first
        ...     meter.update(logits[0], logits[1:], target)
        >>> [d.mean_kl for d in meter.results()]
    """

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._agree: list[Tensor] = []
        self._reference_nll: list[float] = []
        self._nll: list[Tensor] = []

    def update(self, reference: Tensor, candidates: Tensor, next_token: int) -> None:
        """Add a position: logits `[vocab]` of the full cache, `[R, vocab]` or `[vocab]` of candidates, the next token.

        Log-softmax is taken in float64. A logit of -inf in the full cache (a banned token) adds nothing to KL.
        Raises RequestError when shapes or the number of candidates do not fit, NumericsError for NaN.
        """
        candidates = candidates[None] if candidates.ndim == 1 else candidates
        if reference.ndim != 1 or candidates.ndim != 2 or candidates.shape[1] != len(reference):
            raise RequestError(
                f"logits of shape {tuple(candidates.shape)} cannot be compared with {tuple(reference.shape)}"
            )
        if self._kl and len(self._kl[0]) != len(candidates):
            raise RequestError(f"this meter compares {len(self._kl[0])} candidates, not {len(candidates)}")
        if not 0 <= next_token < len(reference):
            raise RequestError(f"token id {next_token} is outside the vocabulary of {len(reference)}")
        if bool(torch.isnan(reference).any()) or bool(torch.isnan(candidates).any()):
            raise NumericsError(f"NaN in the logits of position {len(self._kl)}")
        p = reference.double().log_softmax(-1)  # [vocab]
        q = candidates.double().log_softmax(-1)  # [R, vocab]
        terms = torch.where(p > -math.inf, p.exp() * (p - q), 0.0)
        self._kl.append(terms.sum(-1).clamp_min(0.0).cpu())
        self._agree.append((q.argmax(-1) == p.argmax()).cpu())
        self._reference_nll.append(-float(p[next_token]))
        self._nll.append(-q[:, next_token].cpu())

    def positions(self) -> list[Positions]:
        """Every position's figures, one set a candidate. Raises RequestError before the first `update`."""
        if not self._kl:
            raise RequestError("nothing was compared yet: feed at least one position")
        reference = torch.tensor(self._reference_nll, dtype=torch.float64)
        columns = (torch.stack(x).unbind(1) for x in (self._kl, self._agree, self._nll))
        return [Positions(kl, agree, nll, reference) for kl, agree, nll in zip(*columns, strict=True)]

    def results(self) -> list[Divergence]:
        """What was collected, one a candidate. Raises RequestError before the first `update`."""
        return [Divergence.of(positions) for positions in self.positions()]
