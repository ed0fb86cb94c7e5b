"""Temperatures: they meet the counts they are solved for, are kept, and are solved again when they drift."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siftkv.policies.hardkv.calibration import (
    DRIFT_TOLERANCE,
    HIGHEST,
    LOWEST,
    calibrate,
    calibrated_count,
    solve_temperature,
)
from siftkv.policies.hardkv.metrics import METRICS
from siftkv.policies.hardkv.rows import attention_rows, top_p_count
from siftkv.policies.hardkv.selection import vote
from tests.hardkv.layers import layer


def longest_run(row: torch.Tensor, at: int) -> int:
    """Length of the run of equal values that the element at `at` stands in."""
    return int((row == row[at]).sum())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("p", [0.5, 0.9, 0.98])
@pytest.mark.parametrize("sharp", [0.3, 1.0, 3.0])
def test_counts_agree_up_to_ties_on_every_row(metric: str, p: float, sharp: float) -> None:
    tokens = layer(1, count=120, sharp=sharp, gaps=True)
    rows = attention_rows(tokens)
    count = top_p_count(rows.raw, rows.visible, p)
    largest = METRICS[metric](7).logits(rows, tokens).sort(-1, descending=True).values
    found = calibrated_count(largest, solve_temperature(largest, count, p), p)
    for row, k, own in zip(largest.flatten(0, 1), count.flatten().tolist(), found.flatten().tolist(), strict=True):
        assert abs(own - k) <= longest_run(row, k - 1) - 1, (k, own)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 80), st.floats(0.1, 0.99), st.floats(0.01, 30.0))
def test_any_count_that_has_a_root_is_met(seed: int, size: int, p: float, spread: float) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values * spread
    for count in range(1, size + 1):
        if count > p * size:  # below that no temperature is high enough
            break
        temperature = solve_temperature(x, torch.tensor(count), p)
        if LOWEST * 1.01 < float(temperature) < HIGHEST * 0.99:
            assert int(calibrated_count(x, temperature, p)) == count


def test_the_count_grows_with_the_temperature() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(3)).sort(descending=True).values
    counts = [int(calibrated_count(x, torch.tensor(t), 0.9)) for t in (0.01, 0.1, 0.5, 1.0, 3.0, 100.0)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 45


@pytest.mark.parametrize("metric", METRICS)
def test_both_modes_choose_the_same_when_solved(metric: str) -> None:
    tokens = layer(4, count=150, sharp=2.0)
    exact = vote(tokens, 0.9, METRICS[metric](7))
    solved = vote(tokens, 0.9, METRICS[metric](7), calibrated=True)
    assert torch.equal(exact.votes, solved.votes)


def test_a_temperature_is_kept_until_it_drifts() -> None:
    tokens = layer(5, count=150)
    rows = attention_rows(tokens)
    largest = rows.logits.sort(-1, descending=True).values
    count = top_p_count(rows.raw, rows.visible, 0.9)
    _, first = calibrate(largest, count, 0.9, None)
    assert bool((first.drift == 0).all())
    counts, second = calibrate(largest, count, 0.9, first)
    assert torch.equal(second.temperature, first.temperature)
    assert (second.drift <= DRIFT_TOLERANCE).all()
    assert torch.equal(counts, calibrated_count(largest, first.temperature[:, None].expand(count.shape), 0.9))
    half = (count // 2).clamp_min(1)  # attention has become twice as sharp, the metric has not
    counts, third = calibrate(largest, half, 0.9, second)
    assert torch.equal(counts, half)
    assert (third.drift > DRIFT_TOLERANCE).all()
    assert (third.temperature < first.temperature).all()


def test_attention_needs_no_temperature() -> None:
    """Its own distribution has its own counts at T = 1: the median of the rows' temperatures is close to that."""
    found = vote(layer(6, count=200), 0.9, METRICS["attention"](7), calibrated=True)
    assert found.calibration is not None
    torch.testing.assert_close(found.calibration.temperature, torch.ones(2), rtol=0.02, atol=0.02)
    assert found.calibration.error.max() < 0.05
