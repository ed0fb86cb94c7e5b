"""The GPU's decode attention against the reference, over random caches filled on the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from siftkv.cache import CacheSpec, KVCache, SlotRule, build_conditioning
from siftkv.errors import FormatError
from siftkv.formats import Tier, TierFormat
from siftkv.kernels import reference
from siftkv.kernels.state import CacheState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS, HEADS, WINDOW, SINKS = 2, 2, 24, 3


def make_cache(
    formats: tuple[str, ...], dim: int, dtype: torch.dtype, bias: bool, mode: str, refresh: int, max_len: int = 2048
) -> tuple[KVCache, list[int]]:
    """A cache and its requests' slots: prompts of ragged lengths, one only a window long, in random tiers a head."""
    tiers = tuple(Tier(TierFormat.parse(name)) for name in formats)
    spec = CacheSpec(LAYERS, HEADS, dim, dtype, tiers, 2000, 6, max_len, max_window=WINDOW, sink_rows=4)
    angle = torch.arange(max_len)[:, None] * 10000.0 ** (-torch.arange(dim // 2) * 2 / dim)
    biases = [torch.randn(HEADS, dim) * 8 * (torch.rand(HEADS, dim) < 0.2) if bias else None] * LAYERS
    conditioning = build_conditioning(
        LAYERS, HEADS, dim, angle.cos().cuda(), angle.sin().cuda(), biases, [torch.ones(HEADS, dim)] * LAYERS, mode
    )
    cache = KVCache(spec, conditioning, reference)  # type: ignore[arg-type]
    cache.state.pages.random_(0, 256)
    shape = (LAYERS, HEADS, len(formats))
    slots = []
    for length in (2, 700, 27, 191, 1025):
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


@pytest.mark.parametrize("mode", ["full", "bias", "none"])
@pytest.mark.parametrize("group", [4, 7, 12])
def test_conditioning_and_bias(mode: str, group: int) -> None:
    torch.manual_seed(group)
    cache, slots = make_cache(("k8v4", "k4v2"), 128, torch.bfloat16, bias=True, mode=mode, refresh=2)
    check(cache, slots, group)


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
