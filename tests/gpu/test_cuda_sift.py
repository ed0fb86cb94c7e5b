"""The GPU's sifting step and page bookkeeping against the reference on a CPU: the same bytes, page ids and counters."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from siftkv.cache.conditioning import hadamard
from siftkv.errors import FormatError
from siftkv.kernels import reference
from siftkv.kernels.cuda.append import append_tokens, refused_layers, write_window
from siftkv.kernels.cuda.pages import release
from siftkv.kernels.cuda.sift import sift_step
from siftkv.kernels.reference.attention import append_to_window, tier_tokens
from siftkv.kernels.reference.quantize import decode
from siftkv.kernels.reference.tokens import read_records
from siftkv.kernels.state import CacheState, window_row
from tests.kernel_helpers import assert_same, fill, live_bytes, make_state, random_tiers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TIERS = {
    ("bf16",): (0.9,),
    ("k8v4", "k4v2"): (0.3, 0.5),
    ("k8v4", "k4v4", "k4v2"): (0.2, 0.3, 0.4),
    ("bf16", "k8v4c", "k4v2c"): (0.2, 0.3, 0.3),
    ("k8v4c", "k4v2_g24", "k1v1", "k2v8_g82c"): (0.2, 0.3, 0.2, 0.2),
}


def moved(state: CacheState, device: str) -> CacheState:
    """A copy on another device, without what kernels derived."""

    def move(x: object) -> object:
        return x.detach().clone().to(device) if isinstance(x, Tensor) else x

    fields = {f.name: move(getattr(state, f.name)) for f in dataclasses.fields(state) if f.name != "scratch"}
    c = state.conditioning
    fields["conditioning"] = type(c)(**{f.name: move(getattr(c, f.name)) for f in dataclasses.fields(c)})
    return CacheState(**fields)  # type: ignore[arg-type]


def filled(tiers: tuple[str, ...], lengths: tuple[int, ...] = (120, 90, 37), **options: Any) -> CacheState:
    """A CPU cache whose slots hold prompts of `lengths` tokens and whose head slots live by random rules."""
    state = make_state(tiers, slots=len(lengths), **options)
    if state.conditioning.rotates:
        state.conditioning.rotation = hadamard(state.window_k.shape[-1])
    for slot, length in enumerate(lengths):
        fill(state, slot, length, slot, TIERS[tiers])
    g = torch.Generator().manual_seed(len(tiers))
    state.alpha = torch.rand(state.alpha.shape, generator=g) * 2
    state.catch_up = torch.tensor([0, 1, 1])
    return state


def sift(slow: CacheState, quick: CacheState, seed: int, steps: int, rotated: bool = False) -> int:
    """Random steps on both; returns how often a request was not served."""
    order, refused = random.Random(seed), 0
    _, layers, heads, _, dim = slow.window_k.shape
    for step in range(steps):
        slots = torch.tensor(order.sample(range(3), order.choice([1, 2, 3, 3])))
        g = torch.Generator().manual_seed(100 * seed + step)
        for layer in range(layers):
            k, v = (torch.randn(len(slots), heads, dim, generator=g) for _ in range(2))
            append_to_window(slow, layer, slots, k, v)
        slow.window_score.copy_(torch.rand(slow.window_score.shape, generator=g) ** 3 * 0.03)
        for name in ("window_k", "window_v", "window_score"):
            getattr(quick, name).copy_(getattr(slow, name))
        if step % 4 == 3:
            newest = window_row(slow, slow.seen, slow.sinks)[slots[0]]
            for state in (slow, quick):
                state.window_v[slots[0], -1, -1, newest, dim // 2] = torch.inf
        served = reference.sift_step(slow, slots)
        assert torch.equal(sift_step(quick, slots.cuda()).cpu(), served)
        for name in ("not_finite", "peak_pages"):
            assert torch.equal(getattr(slow, name), getattr(quick, name).cpu()), name
        if step % 4 == 3:
            assert bool(slow.not_finite[slots[0]])
            for state in (slow, quick):
                state.not_finite.zero_()
                state.window_v[slots[0], -1, -1, newest, dim // 2] = 0.0
        refused += int((~served).sum())
        compare = assert_close if rotated else assert_same
        compare(slow, moved(quick, "cpu"))
    return refused


def assert_close(a: CacheState, b: CacheState) -> None:
    """Equal but for the last bits of rotated keys, which may move a scale by one place and a code by one."""
    left, right = live_bytes(a), live_bytes(b)
    for name, value in left.items():
        if not name.startswith("records"):
            assert torch.equal(value, right[name]), f"{name} differs"
    slots = torch.arange(a.seen.shape[0])
    for layer in range(a.lengths.shape[1]):
        for tier, layout in enumerate(a.layouts):
            index, page, valid = tier_tokens(a, layer, slots, tier)
            mine, theirs = (decode(layout, read_records(x, tier, page, index.expand_as(page))[valid]) for x in (a, b))
            for x, y in zip(mine[1:], theirs[1:], strict=True):
                assert torch.equal(x, y)
            if not len(mine[0]):
                continue
            spread = (mine[0].amax(-1) - mine[0].amin(-1)) / (2 ** min(8, layout.format.key_bits) - 1)
            difference = (mine[0] - theirs[0]).abs()
            assert bool((difference <= 1.01 * spread[:, None] + 1e-3 * mine[0].abs()).all())
            assert float((difference > 1e-3 * mine[0].abs().amax()).float().mean()) < 0.02


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize(("dim", "dtype"), [(80, torch.float16), (64, torch.bfloat16), (128, torch.bfloat16)])
def test_sift_steps_are_the_same_to_the_bit(tiers: tuple[str, ...], dim: int, dtype: torch.dtype) -> None:
    if "bf16" in tiers:
        dtype = torch.bfloat16
    state = filled(tiers, dim=dim, dtype=dtype, rotates=False, rank=2 * (dim == 64))
    g = torch.Generator().manual_seed(dim)
    state.cap = torch.randint(0, 60, state.cap.shape, generator=g).to(torch.int32)
    share = torch.rand(state.cap_share.shape, generator=g)
    state.cap_share = torch.where(share < 0.5, share * 0.6 - 0.01, torch.inf)
    lengths = state.lengths.clone()
    sift(state, moved(state, "cuda"), dim, 10)
    assert not torch.equal(lengths, state.lengths)


@pytest.mark.parametrize("dim", [16, 80, 96, 128, 256])
def test_rotated_keys_are_close(dim: int) -> None:
    state = filled(("k8v4", "k4v4", "k4v2"), dim=dim, rank=dim // 32)
    sift(state, moved(state, "cuda"), dim, 6, rotated=True)


@pytest.mark.parametrize("seed", range(3))
def test_sift_steps_agree_when_pages_run_out(seed: int) -> None:
    tiers = ("k8v4", "k4v4", "k4v2")
    held = int(filled(tiers).counters[0])
    state = filled(tiers, pages=held + 4, seed=seed, ring=64, rotates=False)
    state.alpha *= 0.5
    assert sift(state, moved(state, "cuda"), seed, 30) > 0


def test_tiers_without_state() -> None:
    state = filled(("k8v4", "k4v2"), state_in_pages=False, rotates=False)
    sift(state, moved(state, "cuda"), 1, 8)


def test_many_requests_take_pages_in_order() -> None:
    """More requests than one round of the coordinating block holds, most of which need pages."""
    state = make_state(("k8v4", "k4v2"), dim=16, slots=600, layers=1, heads=2, pages=900, ring=40, rotates=False)
    state.seen += 40
    state.window_start += 4
    quick, slots = moved(state, "cuda"), torch.randperm(600)
    served = reference.sift_step(state, slots)
    assert torch.equal(sift_step(quick, slots.cuda()).cpu(), served)
    assert 0 < int(served.sum()) < 600
    assert_same(state, moved(quick, "cpu"))


def test_steps_replay_from_a_graph() -> None:
    state = filled(("k8v4", "k4v2"), rotates=False)
    quick, slots = moved(state, "cuda"), torch.tensor([2, 0, 1], device="cuda")
    sift_step(quick, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        served = sift_step(quick, slots)
    for name, value in vars(moved(state, "cuda")).items():
        if isinstance(value, Tensor):
            getattr(quick, name).copy_(value)
    for order in ([2, 0, 1], [0, 1, 2], [1, 2, 0]):
        expected = reference.sift_step(state, torch.tensor(order))
        slots.copy_(torch.tensor(order))
        graph.replay()
        assert torch.equal(served.cpu(), expected)
        assert_same(state, moved(quick, "cpu"))


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_released_pages_return_in_the_order_of_the_tables(tiers: tuple[str, ...]) -> None:
    state = filled(tiers, lengths=(301, 4, 240))
    quick = moved(state, "cuda")
    for slots in ([2, 0], [1], []):
        reference.release(state, torch.tensor(slots, dtype=torch.int64))
        release(quick, torch.tensor(slots, dtype=torch.int64, device="cuda"))
        assert_same(state, moved(quick, "cpu"))


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("scale", [1.0, 1e5, 1e-5])
def test_append_tokens_is_the_same_to_the_bit(tiers: tuple[str, ...], scale: float) -> None:
    dim = 24 if len(tiers) == 3 else 64
    slow = make_state(tiers, dim=dim, rank=2, rotates=False, pages=2000, width=300)
    quick, g = moved(slow, "cuda"), torch.Generator().manual_seed(3)
    for turn, count in enumerate((0, 1, 1100)):
        k, v = (torch.randn(count, 3, slow.window_k.shape[-1], generator=g) * scale for _ in range(2))
        v[count // 2 :] *= 1e-3
        v[::3, :, 5] *= 25
        k[: count // 4] = 0.5
        k, v = k.bfloat16(), v.bfloat16()
        score, position = torch.rand(3, count, generator=g) ** 6 * 1.1, torch.arange(count) + 7 * turn
        tier = random_tiers(3, count, TIERS[tiers], g)
        for layer in (1, 0, 1):
            tokens = (k, v, score, position, tier)
            reference.append_tokens(slow, layer, turn, *tokens)
            append_tokens(quick, layer, turn, *(x.cuda() for x in tokens))
    assert_same(slow, moved(quick, "cpu"))


def test_append_takes_views_and_keeps_nothing_when_pages_are_short() -> None:

    slow = make_state(("k8v4", "k4v2"), pages=60, rotates=False)
    quick, g = moved(slow, "cuda"), torch.Generator().manual_seed(3)
    qkv = torch.randn(500, 3, 4, 64, generator=g).bfloat16()
    k, v = qkv[:, :, 1], qkv[:, :, 3]
    score, position = torch.rand(500, 3, generator=g).T, torch.arange(1000)[::2]
    tier = random_tiers(500, 3, (0.3, 0.5), g).T
    tokens = (k, v, score, position, tier)
    device = [x.cuda() for x in (qkv, score.T.contiguous(), torch.arange(1000), tier.T.contiguous())]
    views = (device[0][:, :, 1], device[0][:, :, 3], device[1].T, device[2][::2], device[3].T)
    reference.append_tokens(slow, 1, 0, *tokens)
    for slot in range(4):
        append_tokens(quick, 1, min(slot, 2), *views)
        if slot == 0:
            assert not refused_layers(quick).any()
            assert_same(slow, moved(quick, "cpu"))
    copy = moved(quick, "cpu")
    assert int(refused_layers(quick)[2]) == 2
    assert int(copy.counters[0]) <= 60
    assert int((copy.page_table >= 0).sum()) == int(copy.counters[0])
    release(quick, torch.tensor([2], device="cuda"))
    assert not refused_layers(quick).any()


def test_write_window_is_the_same() -> None:
    slow = make_state(("k8v4", "k4v2"), rotates=False)
    quick, g = moved(slow, "cuda"), torch.Generator().manual_seed(1)
    k, v = (torch.randn(30, 3, 64, generator=g).bfloat16() for _ in range(2))
    tokens = (k, v, torch.rand(3, 30, generator=g), torch.cat([torch.arange(4), torch.arange(100, 126)]))
    reference.write_window(slow, 1, 2, *tokens)
    write_window(quick, 1, 2, *(x.cuda() for x in tokens))
    assert_same(slow, moved(quick, "cpu"))


def test_steps_without_examination_and_the_padding_slot() -> None:
    state = filled(("k8v4", "k4v2"), rotates=False)
    state.catch_up.zero_()
    quick = moved(state, "cuda")
    quick.padding_slot = 1
    held = quick.seen[1].clone()
    for _ in range(4):
        served = reference.sift_step(state, torch.tensor([2, 0]), False)
        found = sift_step(quick, torch.tensor([2, 0, 1, 1], device="cuda"), False)
        assert torch.equal(found[:2].cpu(), served)
    assert quick.seen[1] == held
    assert torch.equal(quick.seen[[0, 2]].cpu(), state.seen[[0, 2]])


def test_unsuitable_caches_are_named() -> None:
    state = moved(make_state(("fp16", "k8v4"), dtype=torch.bfloat16, rotates=False), "cuda")
    with pytest.raises(FormatError, match="fp16"):
        sift_step(state, torch.tensor([0], device="cuda"))
