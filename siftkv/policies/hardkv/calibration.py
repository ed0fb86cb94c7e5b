"""How many tokens a row keeps when they are ranked by another metric than attention.

*Rank*: as many as attention itself needs to reach `p`. Exact. *Temperature*: a temperature a head, at which the
metric's own distribution reaches `p` with that count; it is kept, so that later counts follow the metric's sharpness,
and solved again when the counts have drifted away from attention's.

Source of the idea: Hard-KV (arXiv 2606.28831), section 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.policies.hardkv.rows import count_to

LOWEST, HIGHEST = 1e-3, 1e3
"""Temperatures are sought between these; a row whose root lies beyond them takes the nearer one."""

_HALVINGS = 32

DRIFT_TOLERANCE = 0.1
"""A head's temperature is solved again when its mean count is off by more than this share of attention's."""


@dataclass(frozen=True)
class HeadCalibration:
    """Temperatures of a layer's heads and how well they do, fp32 `[H]` each.

    error: mean share by which the head's one temperature missed the counts of its rows when it was solved. drift: share
        by which the head's mean count is off now.
    """

    temperature: Tensor
    error: Tensor
    drift: Tensor


def solve_temperature(largest: Tensor, count: Tensor, p: float) -> Tensor:
    """The temperature at which top-p of `softmax(x / T)` keeps `count` tokens: fp32 `[...]`.

    largest: fp32 `[..., n]`, a metric's logits, largest first (-inf = no token). count: int64 `[...]`, at least 1.

    With `b = 1 / T` and `M_k(b)` the mass of the `k` largest, `dM/db = M (E_top[x] - E_all[x]) >= 0`, so bisection in
    log T always converges. The root sought is that of `(M_k + M_{k-1}) / 2 = p`, which stands off both counts that
    rounding could tip it to.
    """
    x = (largest - largest[..., :1]).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    low = torch.full(count.shape, LOWEST, device=x.device).log()
    high = torch.full(count.shape, HIGHEST, device=x.device).log()
    inside = torch.arange(x.shape[-1], device=x.device) < count[..., None]
    edge = (count - 1).clamp_min(0)[..., None]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        e = (x / middle.exp()[..., None]).exp()
        top = (e * inside).sum(-1) - e.gather(-1, edge)[..., 0] / 2
        sharp = top / e.sum(-1) > p
        low, high = torch.where(sharp, middle, low), torch.where(sharp, high, middle)
    return ((low + high) / 2).exp()


def calibrated_count(largest: Tensor, temperature: Tensor, p: float) -> Tensor:
    """Tokens that top-p of `softmax(x / T)` keeps: int64 `[...]` of logits fp32 `[..., n]`, largest first."""
    seen = largest > -torch.inf
    probability = (largest / temperature[..., None]).softmax(-1).nan_to_num(0.0)
    return count_to(probability, p).minimum(seen.sum(-1))


def calibrate(
    largest: Tensor, count: Tensor, p: float, known: HeadCalibration | None
) -> tuple[Tensor, HeadCalibration]:
    """Counts (int64 `[H, R]`) by temperature, and the calibration to keep for the next time.

    largest: fp32 `[H, R, n]`; count: attention's own counts, int64 `[H, R]`. known: from earlier, NaN where not solved.
    Heads without a temperature, or with one that has drifted beyond `DRIFT_TOLERANCE`, are solved: this time each of
    their rows takes exactly attention's count, and the median of their rows' temperatures is kept.
    """
    mean = count.float().mean(-1).clamp_min(1)
    if known is None:
        unknown = torch.full(mean.shape, torch.nan, device=mean.device)
        known = HeadCalibration(unknown, unknown, unknown)
    cached = calibrated_count(largest, known.temperature.nan_to_num(1.0)[:, None].expand(count.shape), p)
    drift = (cached.float().mean(-1) - mean).abs() / mean
    stale = ~(drift <= DRIFT_TOLERANCE) | known.temperature.isnan()
    temperature, error = known.temperature.clone(), known.error.clone()
    drift = torch.where(known.temperature.isnan(), 0.0, drift)
    if bool(stale.any()):
        rows = solve_temperature(largest[stale], count[stale].clamp_min(1), p)
        temperature[stale] = rows.log().median(-1).values.exp()
        again = calibrated_count(largest[stale], temperature[stale][:, None].expand(rows.shape), p)
        error[stale] = ((again - count[stale]).abs() / count[stale].clamp_min(1)).mean(-1)
    return torch.where(stale[:, None], count, cached), HeadCalibration(temperature, error, drift)
