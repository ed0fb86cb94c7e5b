"""Formats, page layouts and the reference quantiser."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siftkv.cache import CacheSpec, merge_tiers
from siftkv.cache.page_size import choose_page_bytes
from siftkv.errors import FormatError
from siftkv.formats import KNOWN_FORMATS, SEGMENT_ALIGN, TOKEN_QUANTUM, PageLayout, Tier, TierFormat
from siftkv.kernels.reference.fit import FITTED_BITS
from siftkv.kernels.reference.quantize import (
    decode,
    encode,
    half_down_signed,
    half_from_bits,
    half_up,
    pack_planes,
    score_bits,
    score_from_bits,
    unpack_planes,
    votes_and_weights,
)
from siftkv.kernels.reference.scores import stochastic_score_bits

HEAD_DIMS = (16, 64, 80, 96, 128, 192, 256)
NAMES = (*KNOWN_FORMATS, "fp16", "fp32", "k4v2_g24", "k8v4_g12", "k4v4_g22", "k4v2c", "k8v4c", "k8v8c", "k4v1c", "k1v1")


def layout_of(name: str, head_dim: int, page_bytes: int = 1 << 14) -> PageLayout:
    return PageLayout(Tier(TierFormat.parse(name)), head_dim, page_bytes)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_holds_its_tokens_without_overlap(name: str, head_dim: int) -> None:
    layout = layout_of(name, head_dim)
    base, stride = layout.record
    assert len(base) == len(stride) == layout.token_bytes
    address = base + stride * torch.arange(layout.tokens)[:, None]
    assert address.unique().numel() == address.numel(), "no two bytes share a place"
    assert 0 <= int(address.min()) <= int(address.max()) < layout.page_bytes
    assert all(offset % SEGMENT_ALIGN == 0 for offset in layout.offsets)
    assert layout.format.dense or layout.tokens % TOKEN_QUANTUM == 0
    assert 0 <= layout.waste < 0.3


@pytest.mark.parametrize(
    ("name", "head_dim", "state"), [("k8v4", 64, 14), ("k4v2", 128, 14), ("k4v2c", 128, 12), ("k4v2_g24", 128, 30)]
)
def test_state_bytes(name: str, head_dim: int, state: int) -> None:
    layout = layout_of(name, head_dim)
    assert layout.state_bytes == state
    assert layout.token_bytes == head_dim * (layout.format.key_bits + layout.format.value_bits) // 8 + state


def test_compact_without_positions_and_scores_is_under_ten_bytes() -> None:
    tier = Tier(TierFormat.parse("k4v2c"), scores=False, positions=False)
    assert PageLayout(tier, 64, 4096).state_bytes == 6


@pytest.mark.parametrize("name", ["bf16", "k8v4", "k4v2c", "k4v2_g24"])
def test_votes_and_weights_take_six_bytes_and_move_nothing_else(name: str) -> None:
    fmt = TierFormat.parse(name)
    plain = PageLayout(Tier(fmt), 64, 4096)
    assert plain.offsets[6] == plain.offsets[7] <= plain.page_bytes, "without them the segments are empty"
    full = PageLayout(Tier(fmt, votes=True, weights=True), 64, 4096)
    assert full.state_bytes == plain.state_bytes + 6
    same_tokens = [PageLayout(Tier(fmt, votes=x, weights=x), 64, 4096)._segments(8)[:6] for x in (False, True)]
    assert same_tokens[0] == same_tokens[1]
    base, stride = full.record
    address = base + stride * torch.arange(full.tokens)[:, None]
    assert address.unique().numel() == address.numel() == full.tokens * full.token_bytes
    assert int(address.max()) < full.page_bytes
    assert all(offset % SEGMENT_ALIGN == 0 for offset in full.offsets)
    assert choose_page_bytes((Tier(fmt, votes=True, weights=True),), 64) % 64 == 0


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("name", ["fp32", "k8v4"])
def test_votes_saturate_and_weights_come_back(name: str, flags: tuple[bool, bool]) -> None:
    layout = PageLayout(Tier(TierFormat.parse(name), True, True, *flags), 16, 4096)
    x, score, position = torch.randn(4, 16), torch.rand(4), torch.arange(4) * 1000
    votes, weight = torch.tensor([0, 40000, 65535, 70000]), torch.tensor([0.0, -3.5, 1e-3, 12.25])
    record = encode(layout, x, x, score, position, votes, weight)
    assert record.shape == (4, layout.token_bytes)
    found = votes_and_weights(layout, record)
    assert torch.equal(found[0], votes.clamp(max=65535).int() * flags[0])
    assert torch.equal(found[1], weight * flags[1])
    assert torch.equal(decode(layout, record)[3], position)
    new = encode(layout, x, x, score, position)
    assert not any(bool(part.any()) for part in votes_and_weights(layout, new))


def test_tiers_are_merged_with_all_that_any_user_needs() -> None:
    dense, low = TierFormat.parse("bf16"), TierFormat.parse("k4v2")
    wanted = [Tier(low, False, False), Tier(dense, True, True, votes=True), Tier(dense, False, False)]
    assert merge_tiers(wanted) == (Tier(dense, True, True, True, False), Tier(low, False, False))
    wanted.append(Tier(low, weights=True))
    assert merge_tiers(wanted)[1] == Tier(low, True, True, False, True)
    assert merge_tiers([Tier(low, False, False)], positions=True) == (Tier(low, False, True),)


@pytest.mark.parametrize("state", ["scores", "votes", "weights"])
def test_a_pool_says_what_it_does_not_keep(state: str) -> None:
    fmt = TierFormat.parse("k8v4")
    spec = CacheSpec(1, 1, 16, torch.float32, (Tier(fmt, False, True),), 1, 1, 64)
    assert spec.tier_index(Tier(fmt, False, True)) == 0
    with pytest.raises(FormatError, match=f"no {state} beside k8v4"):
        spec.tier_index(replace(Tier(fmt, False, True), **{state: True}))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_chosen_pages_waste_little(head_dim: int) -> None:
    for names in (("k8v4", "k4v2"), ("k4v4", "k4v2"), ("k8v4", "k4v4", "k4v2"), ("k8v4",), ("bf16",), ("bf16", "k4v4")):
        tiers = tuple(Tier(TierFormat.parse(n)) for n in names)
        page_bytes = choose_page_bytes(tiers, head_dim)
        assert all(PageLayout(t, head_dim, page_bytes).waste < 0.08 for t in tiers), names


@pytest.mark.parametrize("name", ["k3v4", "k8", "int4", "k8v4_g31", "", "k8v4_g1"])
def test_unknown_formats_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="format"):
        TierFormat.parse(name)


def test_page_too_small() -> None:
    with pytest.raises(FormatError, match="holds no token"):
        layout_of("k8v8", 128, 512)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_planes_are_where_the_kernels_expect_them(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 64), dtype=torch.uint8)
    packed = pack_planes(codes, bits)
    assert packed.shape == (3, 8 * bits)
    assert torch.equal(unpack_planes(packed, bits), codes)
    row = packed.shape[1]
    for plane in range(8 // bits):
        assert torch.equal(packed >> (plane * bits) & (2**bits - 1), codes[:, plane * row : (plane + 1) * row])


def group_error(x: torch.Tensor, back: torch.Tensor, bits: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    error = (back - x).abs().unflatten(-1, (groups, -1)).amax(-1)
    grouped = x.unflatten(-1, (groups, -1))
    return error, (grouped.amax(-1) - grouped.amin(-1)) / (2**bits - 1)


FLOATS = st.floats(-65504, 65504, width=32, allow_subnormal=True)


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(FLOATS, min_size=16, max_size=16),
    name=st.sampled_from(["k8v4", "k4v2", "k4v1", "k2v4", "k4v2_g24", "k8v8_g22"]),
    shrink=st.sampled_from([1.0, 1e-3, 1e-7]),
)
def test_error_is_at_most_half_a_step(values: list[float], name: str, shrink: float) -> None:
    """For any finite input, subnormal, constant or extreme: half a step between the extremes, plus what fp16 metadata
    must round. Of every value where all levels are used, of the root mean square where they span a fitted range.
    """
    layout = layout_of(name, 16, 4096)
    x = torch.tensor([values]) * shrink
    k, v, _, _ = decode(layout, encode(layout, x, x, torch.zeros(1), torch.zeros(1, dtype=torch.int64)))
    fmt = layout.format
    for back, bits, groups in ((k, fmt.key_bits, fmt.key_groups), (v, fmt.value_bits, fmt.value_groups)):
        error, step = group_error(x, back, bits, groups)
        if bits <= FITTED_BITS:
            error = (back - x).unflatten(-1, (groups, -1)).square().mean(-1).sqrt()
        metadata = x.abs().max() * 2**-9 + 2.0**-24
        assert bool((error <= step * 0.5 * (1 + 2**-9) + metadata).all()), (error, step)


def test_codes_are_computed_against_the_stored_metadata() -> None:
    """Re-encoding what was decoded changes nothing: the codes are the nearest for the scale and zero in memory."""
    layout = layout_of("k4v2", 64)
    x = torch.randn(200, 64) * torch.logspace(-4, 3, 200)[:, None]
    score, position = torch.rand(200), torch.arange(200)
    record = encode(layout, x, x, score, position)
    k, v, _, _ = decode(layout, record)
    scale = record[:, layout.key_row : layout.key_row + 4].clone().view(torch.float16).float()
    exact = ((x - scale[:, 1:]) / scale[:, :1]).round().clamp(0, 15) * scale[:, :1] + scale[:, 1:]
    torch.testing.assert_close(k, exact, rtol=0, atol=0)
    assert bool((v.amax(-1) <= x.amax(-1) + (x.amax(-1) - x.amin(-1)) / 3).all())


@pytest.mark.parametrize("name", NAMES)
def test_constant_vectors_come_back(name: str) -> None:
    layout = layout_of(name, 64)
    for value in (0.0, 1.5, -2.25, 65504.0, -65504.0):
        x = torch.full((1, 64), value)
        k, v, _, _ = decode(layout, encode(layout, x, x, torch.zeros(1), torch.zeros(1, dtype=torch.int64)))
        assert bool((k == x).all()) or layout.format.name == "bf16"
        tolerance = 0.13 if layout.format.compact else 2.0**-8
        assert bool(((v - x).abs() <= abs(value) * tolerance).all())


def test_compact_values_stay_close_to_fp16_metadata() -> None:
    x = torch.randn(500, 128)
    errors = []
    for name in ("k4v4", "k4v4c"):
        layout = layout_of(name, 128)
        v = decode(layout, encode(layout, x, x, torch.zeros(500), torch.zeros(500, dtype=torch.int64)))[1]
        errors.append(float((v - x).square().mean()))
    assert errors[1] <= errors[0] * 1.15


def test_directed_rounding() -> None:
    x = torch.cat(
        [torch.randn(2000) * 10.0 ** torch.randint(-8, 5, (2000,)), torch.tensor([0.0, 65504.0, -65504.0, 1e9, -1e9])]
    )
    down = half_down_signed(x)
    # Subnormal fp16 numbers (below 6.1e-5) are rounded to the nearest one first.
    inside = (x.abs() <= 65504) & ((x.abs() >= 2.0**-14) | (x == 0))
    assert bool((down[inside] <= x[inside]).all())
    assert torch.equal(down, down.half().float()), "values are fp16"
    up = half_from_bits(half_up(x.abs()))
    assert bool((up[inside] >= x[inside].abs()).all())
    near = x.half().float()
    assert bool(((down - near)[inside].abs() <= near[inside].abs() * 2**-10 + 2**-24).all())


def test_scores_keep_relative_precision() -> None:
    x = torch.logspace(-8.5, 0, 500)
    back = score_from_bits(score_bits(x))
    assert float(((back - x) / x).abs().max()) < 2**-11 + 1e-6
    assert float(score_from_bits(score_bits(torch.zeros(1)))) == 0.0


def test_stochastic_rounding_is_unbiased() -> None:
    """A mean that shrinks by less than half an fp16 step a refresh still shrinks, on average by the right amount."""
    mean = torch.full((4000,), 1e-3)
    position = torch.arange(4000)
    for now in range(5000, 5200):
        bits = stochastic_score_bits(mean * (1 - 1e-4), position, torch.full_like(position, now))
        mean = score_from_bits(bits)
    assert math.isclose(float(mean.mean()), 1e-3 * (1 - 1e-4) ** 200, rel_tol=2e-3)
