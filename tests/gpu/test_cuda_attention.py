"""The GPU's decode attention against the reference, over random caches filled on the device."""

from __future__ import annotations

import copy
from dataclasses import replace
from math import e, log2

import pytest
import torch
from torch import Tensor

from siftkv.cache import CacheSpec, KVCache, SlotRule, build_conditioning
from siftkv.errors import FormatError
from siftkv.formats import Tier, TierFormat
from siftkv.kernels import reference
from siftkv.kernels.reference.condition import bias_logits as reference_bias
from siftkv.kernels.state import CacheState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS, HEADS, WINDOW, SINKS = 2, 2, 24, 3
LOG2_E = log2(e)


def make_cache(
    formats: tuple[str, ...],
    dim: int,
    dtype: torch.dtype,
    bias: bool,
    mode: str,
    refresh: int,
    max_len: int = 2048,
    size: float = 1.0,
    biased: float = 0.2,
    lengths: tuple[int, ...] = (2, 700, 27, 191, 1025),
) -> tuple[KVCache, list[int]]:
    """A cache and its requests' slots: prompts of ragged lengths, one only a window long, in random tiers a head.

    size: of the rotary tables' numbers. biased: the share of channels that have a bias.
    """
    tiers = tuple(Tier(TierFormat.parse(name)) for name in formats)
    spec = CacheSpec(LAYERS, HEADS, dim, dtype, tiers, 2000, len(lengths) + 1, max_len, max_window=WINDOW, sink_rows=4)
    angle = torch.arange(max_len)[:, None] * 10000.0 ** (-torch.arange(dim // 2) * 2 / dim)
    biases = [torch.randn(HEADS, dim) * 8 * (torch.rand(HEADS, dim) < biased) if bias else None] * LAYERS
    cos, sin = ((size * x).cuda() for x in (angle.cos(), angle.sin()))
    spreads = [torch.ones(HEADS, dim)] * LAYERS
    conditioning = build_conditioning(LAYERS, HEADS, dim, cos, sin, biases, spreads, mode)
    cache = KVCache(spec, conditioning, reference)  # type: ignore[arg-type]
    cache.state.pages.random_(0, 256)
    shape = (LAYERS, HEADS, len(formats))
    slots = []
    for length in lengths:
        horizon = 90 if length > 200 else 2**31 - 1
        rule = SlotRule(WINDOW, SINKS, torch.ones(shape), torch.full(shape, 2**31 - 1), refresh, horizon=horizon)
        slot = cache.admit(rule)
        for layer in range(LAYERS):
            k, v = torch.randn(2, length, HEADS, dim, device="cuda", dtype=dtype)
            if bias and conditioning.has_bias:
                k = k + conditioning.bias[layer].to(dtype)
            k = k * (0.5 + torch.rand(dim, device="cuda", dtype=dtype))
            share = torch.rand(HEADS, 1, device="cuda")
            tier = torch.where(torch.rand(HEADS, length, device="cuda") < share, 0, len(formats) - 1)
            tier = torch.where(
                torch.rand(HEADS, length, device="cuda") < 0.2,
                torch.randint(-1, len(formats), tier.shape, device="cuda"),
                tier,
            )
            tier[0] = torch.where(torch.tensor(length == 191, device="cuda"), -1, tier[0])
            score = torch.rand(HEADS, length, device="cuda") * 0.01
            cache.store_prompt(layer, slot, k, v, score, tier.to(torch.int8))
        assert cache.finish_prompt(slot, length) is None
        slots.append(slot)
    return cache, slots


def inputs(slots: list[int], dim: int, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(len(slots), HEADS * group, dim, device="cuda", dtype=dtype) * 1.5
    k, v = torch.randn(2, len(slots), HEADS, dim, device="cuda", dtype=dtype)
    return q, k, v


def relative(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def scores_of(state: CacheState, slots: Tensor, layer: int, tier: int) -> tuple[Tensor, Tensor]:
    """Stored scores of a tier and which of them count."""
    from siftkv.kernels.reference.attention import tier_tokens
    from siftkv.kernels.reference.quantize import score_from_bits
    from siftkv.kernels.reference.tokens import pool_as, state_addresses

    index, page, valid = tier_tokens(state, layer, slots, tier)
    at, _ = state_addresses(state, tier, page, index.expand_as(page))
    return score_from_bits(pool_as(state, torch.int16)[at]), valid


def compare_scores(ours: CacheState, theirs: CacheState, slots: Tensor, layer: int) -> None:
    from siftkv.kernels.reference.attention import window_positions

    _, valid = window_positions(theirs, slots, theirs.seen[slots])
    valid = valid[:, None].expand(-1, HEADS, -1)
    close = {"rtol": 0.02, "atol": 2e-6}
    assert torch.allclose(ours.window_score[slots, layer][valid], theirs.window_score[slots, layer][valid], **close)
    for tier in range(len(theirs.layouts)):
        mine, valid = scores_of(ours, slots, layer, tier)
        reference_scores, _ = scores_of(theirs, slots, layer, tier)
        if not theirs.layouts[tier].tier.scores:
            continue
        assert torch.allclose(mine[valid], reference_scores[valid], **close)


def check(cache: KVCache, slots: list[int], group: int, steps: int = 3) -> None:
    from siftkv.kernels import cuda

    dim, dtype = cache.spec.head_dim, cache.spec.dtype
    device_slots = torch.tensor(slots, device="cuda")[torch.randperm(len(slots), device="cuda")]
    scratch = cache.state.scratch
    for _ in range(steps):
        for layer in range(LAYERS):
            q, k, v = inputs(slots, dim, dtype, group)
            cache.state.scratch = {}
            ours = copy.deepcopy(cache.state)
            ours.scratch = {}
            expected = reference.decode_attention(cache.state, layer, device_slots, q, k, v)
            out = cuda.decode_attention(ours, layer, device_slots, q, k, v)
            assert torch.isfinite(out).all()
            worst = max(relative(out[i], expected[i]) for i in range(len(slots)))
            assert worst < 8e-3, f"relative error {worst}"
            assert torch.equal(ours.window_k, cache.state.window_k)
            assert torch.equal(ours.window_v, cache.state.window_v)
            compare_scores(ours, cache.state, device_slots, layer)
        cache.step(device_slots)
    cache.state.scratch = scratch


@pytest.mark.parametrize("group", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("formats", [("k8v4", "k4v2"), ("k4v4",), ("bf16", "k8v8", "k4v2")], ids="+".join)
def test_groups_and_formats(group: int, formats: tuple[str, ...]) -> None:
    torch.manual_seed(group)
    cache, slots = make_cache(formats, 128, torch.bfloat16, bias=False, mode="full", refresh=0)
    check(cache, slots, group)


@pytest.mark.parametrize("dim", [64, 80, 96, 192, 256])
def test_head_dims(dim: int) -> None:
    torch.manual_seed(dim)
    formats = ("k8v4", "k4v4") if dim == 80 else ("k8v4", "k4v2")
    cache, slots = make_cache(formats, dim, torch.float16, bias=False, mode="full", refresh=1)
    check(cache, slots, 4)


@pytest.mark.parametrize(
    "formats",
    [("k4v4_g22", "k4v2_g24"), ("k8v8", "k4v2c"), ("k2v4", "k1v1"), ("fp16", "k8v2", "k4v8", "k4v1")],
    ids="+".join,
)
def test_other_formats(formats: tuple[str, ...]) -> None:
    torch.manual_seed(3)
    cache, slots = make_cache(formats, 128, torch.float16, bias=False, mode="full", refresh=1)
    check(cache, slots, 4)


@pytest.mark.parametrize("formats", [("k4v4c",), ("bf16",), ("k8v4", "k4v2")], ids="+".join)
def test_heads_of_a_window_alone_beside_longer_ones(formats: tuple[str, ...]) -> None:
    torch.manual_seed(5)
    lengths = (*[2] * 10, 300, *range(20, 32), 500)  # few: the reference unpacks 512 tokens for each of them
    cache, slots = make_cache(formats, 128, torch.bfloat16, False, "full", refresh=1, max_len=512, lengths=lengths)
    check(cache, slots, 4, steps=1)


@pytest.mark.parametrize("mode", ["full", "bias", "none"])
@pytest.mark.parametrize("group", [4, 7, 12])
def test_conditioning_and_bias(mode: str, group: int) -> None:
    torch.manual_seed(group)
    cache, slots = make_cache(("k8v4", "k4v2"), 128, torch.bfloat16, bias=True, mode=mode, refresh=2)
    check(cache, slots, group)


def move_positions(cache: KVCache, slots: list[int], kind: str) -> None:
    """Requests become long ones, and tokens in pages get other positions: that of a kind, up to the last there is."""
    from siftkv.kernels.reference.attention import tier_tokens
    from siftkv.kernels.reference.tokens import pool_as, state_addresses

    state, device_slots = cache.state, torch.tensor(slots, device="cuda")
    last = state.conditioning.cos.shape[0] - 1
    shift = (last - 8 - int(state.seen.max())) // state.ring_rows * state.ring_rows
    state.seen[device_slots] += shift
    state.window_start[device_slots] += shift
    for layer in range(LAYERS):
        for tier in range(len(state.layouts)):
            index, page, valid = tier_tokens(state, layer, device_slots, tier)
            if not index.numel() or not state.layouts[tier].tier.positions:
                continue
            gap = {"contiguous": 1, "near": 5, "far": 70}.get(kind, 1)
            start = torch.randint(0, last + 1 - gap * len(index), page.shape[:2], device="cuda")
            start[0] = last + 1 - gap * len(index)
            position = start[..., None] + gap * index + torch.randint(0, gap, page.shape, device="cuda")
            anywhere = torch.randint(0, last + 1, page.shape, device="cuda")
            position = torch.where(
                torch.rand(page.shape, device="cuda") < {"replaced": 0.05, "any": 1.0}.get(kind, 0.0),
                anywhere,
                position,
            )
            _, at = state_addresses(state, tier, page, index.expand_as(page))
            pool_as(state, torch.int32)[at[valid]] = position[valid].int()


@pytest.mark.parametrize("kind", ["contiguous", "near", "far", "replaced", "any"])
@pytest.mark.parametrize(
    ("formats", "dim", "group", "dtype"),
    [
        (("k8v4", "k4v2"), 128, 1, torch.bfloat16),
        (("bf16", "k4v4"), 128, 8, torch.bfloat16),
        (("k8v8", "k4v2c"), 64, 16, torch.float16),
        (("k8v4", "k4v4_g22"), 256, 5, torch.float16),
        (("k4v4",), 96, 12, torch.bfloat16),
        (("k4v4", "k4v2"), 128, 4, torch.bfloat16),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, tuple) else str(x),
)
def test_key_bias_by_position(kind: str, formats: tuple[str, ...], dim: int, group: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    biased = 0.08 if group == 4 else 0.2  # few enough pairs for coefficients to be kept from tile to tile
    cache, slots = make_cache(formats, dim, dtype, True, "full", refresh=1, max_len=131072, biased=biased)
    assert cache.state.conditioning.rates is not None
    move_positions(cache, slots, kind)
    check(cache, slots, group, steps=2)


@pytest.mark.parametrize("kind", ["contiguous", "any"])
def test_key_bias_where_rotary_tables_are_scaled(kind: str) -> None:
    torch.manual_seed(8)
    cache, slots = make_cache(("k8v4", "k4v2"), 128, torch.bfloat16, True, "full", refresh=1, max_len=8192, size=1.2)
    move_positions(cache, slots, kind)
    check(cache, slots, 4, steps=2)


@pytest.mark.parametrize("kind", ["contiguous", "any"])
def test_key_bias_where_turns_are_not_steady(kind: str) -> None:
    torch.manual_seed(7)
    cache, slots = make_cache(("k8v4", "k4v2"), 128, torch.bfloat16, bias=True, mode="full", refresh=1, max_len=8192)
    cache.state.conditioning = replace(cache.state.conditioning, rates=None)
    move_positions(cache, slots, kind)
    check(cache, slots, 4, steps=2)


def key_bias_error(kind: str, group: int, biased: float) -> float:
    """Largest error of logits (exponents of two) of a cache whose conditioned keys are 0, against fp64."""
    from siftkv.kernels import cuda
    from siftkv.kernels.reference.attention import tier_tokens
    from siftkv.kernels.reference.tokens import pool_as, state_addresses

    options = {"max_len": 131072, "biased": biased}
    cache, slots = make_cache(("k8v4",), 128, torch.bfloat16, bias=True, mode="full", refresh=1, **options)  # type: ignore[arg-type]
    move_positions(cache, slots, kind)
    state, layout, device_slots = cache.state, cache.spec.layouts[0], torch.tensor(slots, device="cuda")
    state.pages[:, layout.offsets[1] : layout.offsets[1] + 4 * layout.tokens] = 0
    q, k, v = inputs(slots, 128, torch.bfloat16, group)
    index, page, valid = tier_tokens(state, 0, device_slots, 0)
    _, at = state_addresses(state, 0, page, index.expand_as(page))
    position = torch.where(valid, pool_as(state, torch.int32)[at], 0).long()
    c = state.conditioning
    exact = replace(c, cos=c.cos.double(), sin=c.sin.double())
    heads = q.double().unflatten(1, (HEADS, group)) * (LOG2_E / 128**0.5)
    expected = reference_bias(exact, heads, c.bias[0].double(), position)
    cuda.decode_attention(state, 0, device_slots, q, k, v)
    space = state.scratch["cuda_attention"][group]._workspaces[len(slots)].tensors
    worst = 0.0
    for pair, segment in enumerate(space["segments"].view(-1, 4)[1 : 2 * len(slots) * HEADS : 2].tolist()):
        _, tokens, _, start = segment
        got = space["logits"][start : start + tokens, :group].double()
        want = expected[pair % len(slots), pair // len(slots), :, :tokens].T  # head after head
        worst = max(worst, float((got - want).abs().max())) if tokens else worst
    return worst


@pytest.mark.parametrize("kind", ["contiguous", "near", "replaced", "any"])
@pytest.mark.parametrize(("group", "biased"), [(4, 0.2), (4, 0.08), (12, 0.2)])
def test_key_bias_is_as_exact_as_fp32(kind: str, group: int, biased: float) -> None:
    torch.manual_seed(group)
    assert key_bias_error(kind, group, biased) < 1e-4


def test_large_values_do_not_overflow() -> None:
    torch.manual_seed(0)
    cache, slots = make_cache(("k4v2",), 64, torch.bfloat16, bias=False, mode="full", refresh=0)
    cache.state.window_v *= 1000
    layout = cache.spec.layouts[0]
    meta = cache.state.pages[:, layout.offsets[3] : layout.offsets[3] + 4 * layout.tokens]
    meta.view(torch.float16).mul_(500)
    check(cache, slots, 4)


def test_captured_in_a_graph() -> None:
    from siftkv.kernels import cuda

    torch.manual_seed(1)
    cache, slots = make_cache(("k8v4", "k4v2"), 128, torch.bfloat16, bias=False, mode="full", refresh=0)
    device_slots, (q, k, v) = torch.tensor(slots, device="cuda"), inputs(slots, 128, torch.bfloat16, 4)
    cuda.decode_attention(cache.state, 0, device_slots, q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.decode_attention(cache.state, 0, device_slots, q, k, v)
    for _ in range(3):
        cache.step(device_slots)
        device_slots.copy_(device_slots.flip(0))
        for tensor, fresh in zip((q, k, v), inputs(slots, 128, torch.bfloat16, 4), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        expected = reference.decode_attention(cache.state, 0, device_slots, q, k, v)
        assert relative(out, expected) < 8e-3


def test_unreadable_format_is_named() -> None:
    from siftkv.kernels import cuda

    cache, slots = make_cache(("k8v4_g21",), 64, torch.bfloat16, bias=False, mode="full", refresh=0)
    q, k, v = inputs(slots, 64, torch.bfloat16, 2)
    with pytest.raises(FormatError, match="k8v4_g21"):
        cuda.decode_attention(cache.state, 0, torch.tensor(slots, device="cuda"), q, k, v)
