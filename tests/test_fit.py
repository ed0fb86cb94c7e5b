"""Codes of one and two bits: their levels are fitted to a group's values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from siftkv.formats import PageLayout, Tier, TierFormat
from siftkv.kernels.reference.fit import lane_sum, levels_of, nearest_codes
from siftkv.kernels.reference.quantize import decode, encode, expand_compact, quantise_groups

NORMAL_ERROR = {1: 0.3634, 2: 0.1188}
"""Mean square error of the best uniform quantiser of a normal distribution of variance one (Max 1960)."""


def decoded(x: Tensor, bits: int, groups: int) -> Tensor:
    codes, scale, zero = quantise_groups(x, bits, groups)
    return (codes.unflatten(-1, (groups, -1)).float() * scale[..., None] + zero[..., None]).flatten(-2)


def between_extremes(x: Tensor, bits: int) -> Tensor:
    low, high, qmax = x.amin(-1, True), x.amax(-1, True), 2**bits - 1
    return nearest_codes(x, low, (high - low) / qmax, qmax) * (high - low) / qmax + low


def gain(x: Tensor, back: Tensor) -> float:
    """How much of the values' deviation from their group's mean what was decoded carries: 1 = no shrinking."""
    deviation = x - x.mean(-1, True)
    return float(((back - x.mean(-1, True)) * deviation).sum() / deviation.square().sum())


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("dim", [64, 128])
def test_normal_values_are_decoded_with_less_error_and_do_not_shrink(bits: int, dim: int) -> None:
    x = torch.randn(3000, dim, generator=torch.Generator().manual_seed(dim)) * 3 + 0.5
    back = decoded(x, bits, 1)
    error, variance = float((back - x).square().mean()), float(x.var(-1).mean())
    assert error < 0.7 * float((between_extremes(x, bits) - x).square().mean())
    assert error < 1.03 * variance * NORMAL_ERROR[bits] / (1 - NORMAL_ERROR[bits])
    assert gain(x, back) == pytest.approx(1.0, abs=2e-3), "least squares shrink by the error"
    assert abs(float((back - x).mean())) < 0.01


@pytest.mark.parametrize("bits", [1, 2])
def test_compact_metadata_keeps_a_fit(bits: int) -> None:
    x = torch.randn(3000, 64, generator=torch.Generator().manual_seed(bits))
    errors = []
    for name in (f"k4v{bits}", f"k4v{bits}c"):
        layout = PageLayout(Tier(TierFormat.parse(name)), 64, 4096)
        record = encode(layout, x, x, torch.zeros(3000), torch.zeros(3000, dtype=torch.int64))
        errors.append(float((decode(layout, record)[1] - x).square().mean()))
    assert errors[1] < 1.03 * errors[0]
    byte = torch.arange(1, 200, dtype=torch.uint8)
    assert bool((expand_compact(byte, byte, bits)[0] > 0).all())


def test_a_fit_that_expects_more_error_than_the_extremes_is_not_taken() -> None:
    x = torch.randn(500, 1, 128, generator=torch.Generator().manual_seed(0))
    levels = levels_of(x, 2)
    assert bool(levels.fitted.all())
    assert bool((levels.high < x.amax(-1)).all())
    x[..., 7] = 30.0
    levels = levels_of(x, 2)
    assert not levels.fitted.any()
    assert torch.equal(levels.low, x.amin(-1))
    assert torch.equal(levels.high, x.amax(-1))


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("constant", [0.0, 0.1, -3.0])
def test_a_constant_group_keeps_its_value(bits: int, constant: float) -> None:
    x = torch.full((4, 1, 24), constant)
    levels = levels_of(x, bits)
    assert torch.equal(levels.low, x[..., 0])
    assert torch.equal(levels.high, x[..., 0])


@pytest.mark.parametrize("bits", [1, 2])
def test_as_many_values_as_codes_come_back(bits: int) -> None:
    levels = torch.tensor([-1.0, 2.0]) if bits == 1 else torch.tensor([-3.0, -1.0, 1.0, 3.0])
    x = levels.repeat(16 // len(levels))[None]
    torch.testing.assert_close(decoded(x, bits, 1), x, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("dim", "groups"), [(8, 8), (24, 4), (80, 2), (80, 8), (128, 1), (256, 4)])
def test_lanes_add_up_to_the_sum(dim: int, groups: int) -> None:
    x = torch.randn(20, groups, dim // groups)
    torch.testing.assert_close(lane_sum(x), x.sum(-1), rtol=1e-5, atol=1e-5)
    whole = lane_sum(torch.ones(1, groups, dim // groups))
    assert whole.tolist() == [[dim / groups] * groups]
    alone = lane_sum(x[:, -1:, : dim // groups])
    assert math.isclose(float(alone.sum()), float(x[:, -1].sum()), rel_tol=1e-4, abs_tol=1e-4)
