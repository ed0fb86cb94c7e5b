"""Bootstrap intervals: how far a figure would move had other windows, tokens or problems been drawn.

Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), percentile intervals; blocks: Kuensch (1989).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COVERAGE = 0.95
RESAMPLES = 1000
BLOCK = 32
"""Neighbouring positions that are drawn together, since their divergences are alike; a quarter of fewer than 128."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure and the bounds that hold 95 % of its resamples."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside: a difference that resampling does not turn round."""
        return self.low > 0 or self.high < 0

    def scaled(self, factor: float) -> Interval:
        """All three times a positive factor, such as 100 for percent."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


def interval(value: float, resampled: Floats) -> Interval:
    """The percentile interval of a figure from its resamples `[n]`."""
    low, high = np.quantile(resampled, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(value), float(low), float(high))


def mean_interval(
    values: Floats, limits: tuple[float, float] = (0.0, 1.0), seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The mean of `values [n]`, one a problem, and its interval over problems. n >= 1. limits: what a value can be.

    Where all values are equal no resample differs: then the bounds are what n equal outcomes still allow (Clopper and
    Pearson, 1934). Equal seeds and lengths draw the same problems, so that paired figures stay paired.
    """
    if values.min() == values.max():
        reach, value = unseen(len(values), (1 - COVERAGE) / 2), float(values[0])
        return Interval(value, max(limits[0], value - reach), min(limits[1], value + reach))
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    return interval(float(values.mean()), values[drawn].mean(1))


def upper_bound(values: Floats, seed: int = 0, resamples: int = RESAMPLES) -> float:
    """One-sided 95 % upper bound of the mean of `values [n]` over problems: what a non-inferiority claim rests on.

    Where all values are equal, it is what n equal outcomes still allow: three in n, about.
    """
    if values.min() == values.max():
        return min(1.0, float(values[0]) + unseen(len(values), 1 - COVERAGE))
    drawn = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    return float(np.quantile(values[drawn].mean(1), COVERAGE))


def unseen(count: int, risk: float) -> float:
    """Largest share of other outcomes of which `count` draws show none with a probability of at least `risk`."""
    return float(1 - risk ** (1 / count))


def drawn_positions(
    windows: int, positions: int, seed: int = 0, resamples: int = RESAMPLES
) -> Iterator[NDArray[np.int64]]:
    """Resamples of `windows` x `positions` figures, as indices `[windows * positions']` into them laid end to end.

    Windows are drawn with replacement, then, within each, circular blocks of neighbouring positions.
    """
    generator = np.random.default_rng(seed)
    block = min(BLOCK, max(1, positions // 4))
    blocks = -(-positions // block)
    for _ in range(resamples):
        window = generator.integers(windows, size=windows)
        start = generator.integers(positions, size=(windows, blocks))
        within = (start[..., None] + np.arange(block)) % positions  # [windows, blocks, block]
        yield (window[:, None, None] * positions + within).reshape(-1)
