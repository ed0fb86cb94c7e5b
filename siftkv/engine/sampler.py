"""Chooses the next token of every request of a batch.

The order is vLLM's: guides, biases, penalties, ban of end tokens before `min_tokens`, temperature, `min_p`, `top_k`,
`top_p`, draw.
Every draw is a pure function of the request's logits, its seed and its number of output tokens. So neither the
batch mates of a request, nor its place in the batch, nor a preemption and recomputation change what it draws.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from siftkv.engine.foreign import GRAMMAR
from siftkv.engine.guide import GuideState
from siftkv.engine.outputs import TokenLogprob
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import NumericsError, RequestError, SiftKVError

# A nucleus is nearly always smaller than this; ranking so few tokens is ten times cheaper than sorting a vocabulary.
NUCLEUS_TRIAL = 1024


class NonFiniteLogits(NumericsError):
    """Some rows have NaN or +infinity, or no finite logit at all. Nothing was drawn, the other rows can be retried."""

    def __init__(self, rows: Sequence[int], stuck: Mapping[int, str] | None = None) -> None:
        self.rows = tuple(rows)
        """Rows of the batch without a usable distribution."""
        self.stuck = dict(stuck or {})
        """Those of them that a guide left without any token, and why."""
        super().__init__(f"The model gave NaN or infinite logits for row(s) {list(rows)} of the batch.")

    def reason(self, row: int) -> SiftKVError:
        """What to say of one of the rows."""
        if row not in self.stuck:
            return NumericsError("the model gave NaN or infinite logits")
        return RequestError(f"the grammar cannot go on: {self.stuck[row].rstrip('.')}; use a simpler one")


def random_seed() -> int:
    """A seed for a request that gave none."""
    return secrets.randbits(63)


@dataclass
class SamplingRow:
    """What the sampler knows of one completion. Keep one for its lifetime: it caches the prompt's tokens."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    """Prompt tokens; must not change."""
    output_ids: Sequence[int]
    """The live list of generated tokens, without the one to be drawn."""
    eos_token_ids: Sequence[int] = ()
    """End tokens of the model."""
    index: int = 0
    """The completion's place among the n of its request."""
    seed: int = field(default_factory=random_seed)
    """Stands in for `params.seed` if that is None."""

    def uniform(self) -> float:
        """The number in [0, 1) that decides the next token: word 0 of block `len(output_ids)` of a Philox stream."""
        seed = self.seed if self.params.seed is None else self.params.seed
        word = np.random.Philox(key=seed | self.index << 64, counter=len(self.output_ids)).random_raw()
        return int(word >> 11) * 2.0**-53

    @cached_property
    def banned_ids(self) -> list[int]:
        """Tokens that may not come before `min_tokens`; end tokens are harmless where they are ignored."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return sorted({*eos, *self.params.stop_token_ids})

    @property
    def bans(self) -> bool:
        """Whether `banned_ids` are banned at the next token."""
        return len(self.output_ids) < self.params.min_tokens and bool(self.banned_ids)

    @cached_property
    def guide(self) -> GuideState | None:
        """Where this completion stands in its grammar; None where any token may come."""
        with GRAMMAR:
            return None if self.params.guide is None else self.params.guide.start()

    @cached_property
    def biases(self) -> tuple[Tensor, Tensor]:
        """Tokens with a bias, int64 [n], and the biases, float32 [n]; on the CPU."""
        tokens, biases = zip(*self.params.biases)
        # No vocabulary reaches int64's end, which tokens beyond it must not overflow.
        return torch.tensor([min(token, 2**62) for token in tokens]), torch.tensor(biases, dtype=torch.float32)

    @cached_property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Distinct prompt tokens."""
        return np.unique(np.asarray(self.prompt_ids, dtype=np.int64))


@dataclass(frozen=True)
class SampledTokens:
    """The next token of every row."""

    token_ids: list[int]
    """[B]"""
    logprobs: list[TokenLogprob | None]
    """[B]; None for rows that asked for none."""


class Sampler:
    """Draws one token a row. Stateless: one instance serves any number of batches."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        """Choose the next token of every row.

        Args:
            logits: [B, vocab], any float type, any device; left unchanged.
            rows: B rows, in the order of `logits`. All their token ids must be below vocab.

        Raises:
            NonFiniteLogits: before anything is drawn, with the rows at fault.
        """
        assert logits.shape[0] == len(rows), f"{logits.shape[0]} rows of logits for {len(rows)} requests"
        adjusted = _adjust(logits, rows)  # [B, vocab]
        _check_finite(adjusted, logits, rows)
        token_ids = adjusted.argmax(-1)  # [B]; torch gives the first of equal maxima
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            token_ids[drawn] = _draw(adjusted[drawn].float(), [rows[i] for i in drawn])
        return SampledTokens(token_ids.tolist(), _logprobs(logits, rows, token_ids))


def _check_finite(adjusted: Tensor, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    finite = adjusted.amax(-1).isfinite()  # NaN anywhere in a row is its maximum
    if not finite.all():
        wrong = (~finite).nonzero().flatten().tolist()
        with GRAMMAR:
            stuck = {i: guide.failure for i in wrong if (guide := rows[i].guide) and logits[i].amax().isfinite()}
        raise NonFiniteLogits(wrong, {i: why or "it allows no token that may come here" for i, why in stuck.items()})


def _adjust(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Guides, biases, penalties and bans, float32; the logits themselves where no row has any."""
    changed = [i for i, row in enumerate(rows) if row.params.adjusts or row.bans]
    if not changed:
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    for i in changed:
        _guide(adjusted[i], rows[i])
        if rows[i].params.penalised:
            _penalise(adjusted[i], rows[i])
        if rows[i].bans:
            # An end token that the model cannot produce needs no ban.
            adjusted[i, [token for token in rows[i].banned_ids if token < logits.shape[-1]]] = -torch.inf
    return adjusted


def _guide(logits: Tensor, row: SamplingRow) -> None:
    """Bans what the row's guide forbids and adds its biases, in place on one row [vocab]. A guide that has failed
    forbids everything, so that the row counts as one without a usable distribution.
    """
    if row.guide is not None:
        with GRAMMAR:
            allowed = row.guide.allowed(row.output_ids, logits.shape[-1])
        logits.masked_fill_(~allowed.to(logits.device), -torch.inf)
    if row.params.biases:
        tokens, biases = row.biases
        known = tokens < logits.shape[-1]
        logits[tokens[known].to(logits.device)] += biases[known].to(logits.device)


def _penalise(logits: Tensor, row: SamplingRow) -> None:
    """In place on one row [vocab]. Repetition: CTRL (arXiv:1909.05858) section 4.1; the others: OpenAI's API."""
    params = row.params
    output, counts = np.unique(np.asarray(row.output_ids, dtype=np.int64), return_counts=True)
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.union1d(row.prompt_tokens, output)).to(logits.device)
        values, penalty = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    penalties = params.frequency_penalty * counts + params.presence_penalty
    logits[torch.from_numpy(output).to(logits.device)] -= torch.from_numpy(penalties).to(logits)


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """[b] tokens by inversion of the cumulative distribution. Every operation treats each row on its own.

    logits: [b, vocab] float32. float64 from here on: a float32 running sum over a vocabulary loses rare tokens.
    """
    weights = torch.softmax(logits.double() / _column([row.params.temperature for row in rows], logits), dim=-1)
    min_p = _column([row.params.min_p for row in rows], logits)
    weights = weights.masked_fill(weights < min_p * weights.amax(-1, keepdim=True), 0.0)
    cumulative = weights.cumsum(-1)  # [b, vocab]
    top_p = _column([row.params.top_p for row in rows], logits)
    uniform = _column([row.uniform() for row in rows], logits)

    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for top_k, members in _group_by_truncation(rows, logits.shape[-1]).items():
        mass = cumulative[members, -1:]
        if top_k is None:
            token_ids[members] = _invert(cumulative[members], uniform[members] * mass)
        elif top_k:
            token_ids[members] = _draw_top_k(logits[members], weights[members], top_p[members], uniform[members], top_k)
        else:
            token_ids[members] = _draw_nucleus(
                logits[members], weights[members], top_p[members] * mass, uniform[members]
            )
    return token_ids


def _group_by_truncation(rows: Sequence[SamplingRow], vocab: int) -> dict[int | None, list[int]]:
    """Rows by effective top_k: its value, 0 for `top_p` alone, None where nothing is cut off."""
    groups: dict[int | None, list[int]] = {}
    for i, row in enumerate(rows):
        top_k = row.params.top_k if 0 < row.params.top_k < vocab else 0
        groups.setdefault(top_k or (0 if row.params.top_p < 1 else None), []).append(i)
    return groups


def _draw_top_k(logits: Tensor, weights: Tensor, top_p: Tensor, uniform: Tensor, top_k: int) -> Tensor:
    """Draw from the `top_p` nucleus of the `top_k` likeliest tokens. Shapes as in `_draw_ranked`; top_p: [b, 1]."""
    ranking = rank(logits, top_k)
    cumulative = weights.gather(-1, ranking).cumsum(-1)
    return _draw_ranked(ranking, cumulative, top_p * cumulative[:, -1:], uniform)


def _draw_nucleus(logits: Tensor, weights: Tensor, mass: Tensor, uniform: Tensor) -> Tensor:
    """Draw from the likeliest tokens that reach `mass`; ranks the whole vocabulary only where a few do not reach it."""
    vocab = logits.shape[-1]
    ranking = rank(logits, min(NUCLEUS_TRIAL, vocab))
    cumulative = weights.gather(-1, ranking).cumsum(-1)
    token_ids = _draw_ranked(ranking, cumulative, mass, uniform)
    wide = cumulative[:, -1] < mass[:, 0]
    if ranking.shape[-1] < vocab and wide.any():
        ranking = rank(logits[wide], vocab)
        cumulative = weights[wide].gather(-1, ranking).cumsum(-1)
        token_ids[wide] = _draw_ranked(ranking, cumulative, mass[wide], uniform[wide])
    return token_ids


def _draw_ranked(ranking: Tensor, cumulative: Tensor, mass: Tensor, uniform: Tensor) -> Tensor:
    """Draw from the first tokens of a ranking that reach `mass`, at least one.

    ranking: [b, width] token ids; cumulative: [b, width] float64 weights up to each; mass, uniform: [b, 1] float64.
    """
    last = (cumulative < mass).sum(-1, keepdim=True).clamp(max=cumulative.shape[-1] - 1)
    rank_drawn = _invert(cumulative, uniform * cumulative.gather(-1, last))
    return ranking.gather(-1, rank_drawn[:, None])[:, 0]


def _invert(cumulative: Tensor, target: Tensor) -> Tensor:
    """[b] first places where `cumulative` [b, width] exceeds `target` [b, 1]: never a place of weight zero."""
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


def rank(scores: Tensor, width: int) -> Tensor:
    """The `width` best places of each row, best first, equal scores by the lower place.

    `torch.topk` leaves the order of equal scores open, so that it gets keys that are never equal: the bits of the
    float32, made monotone as an integer, above the reversed place.

    Args:
        scores: [B, N] without NaN.
        width: at most N.

    Returns:
        [B, width] int64.
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    reversed_places = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    return ((monotone.long() << 32) | reversed_places).topk(width, dim=-1).indices


def _logprobs(logits: Tensor, rows: Sequence[SamplingRow], token_ids: Tensor) -> list[TokenLogprob | None]:
    """Of the raw logits, as vLLM's default `raw_logprobs`."""
    reports: list[TokenLogprob | None] = [None] * len(rows)
    asked = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    if not asked:
        return reports
    members = list(asked)
    logprobs = logits[members].float().log_softmax(-1)  # [b, vocab]
    ranking = rank(logprobs, min(max(asked.values()), logits.shape[-1]))  # [b, width]
    chosen = token_ids[members]
    chosen_logprobs = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    tops = zip(ranking.tolist(), logprobs.gather(-1, ranking).tolist())
    for i, token_id, logprob, (ids, values) in zip(members, chosen.tolist(), chosen_logprobs, tops):
        reports[i] = TokenLogprob(token_id, logprob, dict(zip(ids[: asked[i]], values)))
    return reports


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
