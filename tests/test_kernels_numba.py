"""The compiled CPU kernels against the reference: to the bit where they store, within fp32 rounding where they
attend.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from siftkv.attention import causal_attention
from siftkv.kernels import numba as fast
from siftkv.kernels import reference
from siftkv.kernels.reference.attention import append_to_window, tier_tokens, window_positions
from siftkv.kernels.reference.tokens import pool_as, weight_addresses
from siftkv.kernels.state import CacheState
from tests.kernel_helpers import assert_same, fill, make_state, random_tiers, tier_scores, twin

TIERS = {
    ("bf16",): (0.9,),
    ("k8v4", "k4v2"): (0.3, 0.5),
    ("k8v4", "k4v4", "k4v2"): (0.2, 0.3, 0.4),
    ("k8v4c", "k4v2c"): (0.4, 0.4),
    ("bf16", "k8v4", "k4v2"): (0.2, 0.3, 0.3),
    ("fp16", "fp32", "k8v8_g88c"): (0.2, 0.3, 0.4),
    ("k8v4c", "k4v2_g24", "k1v1", "k2v8_g82c"): (0.2, 0.3, 0.2, 0.2),
}
SHAPES = {16: (1, torch.float32), 64: (3, torch.bfloat16), 80: (7, torch.float16), 128: (4, torch.bfloat16)}
"""head_dim to query heads a kv head and the model's dtype."""


@pytest.fixture(autouse=True, params=[1, 2], ids=["serial", "threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    held = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(held)


def pair(
    tiers: tuple[str, ...], lengths: tuple[int, ...] = (301, 4, 37), **options: Any
) -> tuple[CacheState, CacheState]:
    """Two equal states whose slots hold prompts of `lengths` tokens."""
    state = make_state(tiers, slots=len(lengths), **options)
    for slot, length in enumerate(lengths):
        fill(state, slot, length, slot, TIERS[tiers])
    return state, twin(state)


def attend(slow: CacheState, quick: CacheState, group: int) -> None:
    """Compare a decode step of every layer; slots are given in an order that is not the stored one."""
    _, layers, heads, _, dim = slow.window_k.shape
    g = torch.Generator().manual_seed(5)
    slots = torch.arange(slow.seen.shape[0]).flip(0)
    for layer in range(layers):
        q = torch.randn(len(slots), heads * group, dim, generator=g) * 2
        k, v = (torch.randn(len(slots), heads, dim, generator=g).to(slow.window_k.dtype) for _ in range(2))
        expected = reference.decode_attention(slow, layer, slots, q, k, v)
        torch.testing.assert_close(fast.decode_attention(quick, layer, slots, q, k, v), expected, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("dim", SHAPES)
def test_decode_attention_agrees(tiers: tuple[str, ...], dim: int) -> None:
    group, dtype = SHAPES[dim]
    slow, quick = pair(tiers, dim=dim, dtype=dtype, rank=dim // 32)
    attend(slow, quick, group)
    assert_same(slow, quick)


@pytest.mark.parametrize("length", [*range(33, 52), 73, 105, 113])
def test_every_page_remainder(length: int) -> None:
    slow, quick = pair(("k8v4", "k4v2"), (length,), refresh=0)
    attend(slow, quick, 3)


def test_long_contexts_are_split_and_merged() -> None:
    slow, quick = pair(("k8v4", "k4v2"), (3500, 40), pages=1200, width=120)
    attend(slow, quick, 3)


def test_tiers_without_state_and_without_conditioning() -> None:
    slow, quick = pair(("k8v4", "k4v2"), state_in_pages=False, rotates=False, refresh=0)
    attend(slow, quick, 2)


@pytest.mark.parametrize(
    "tiers", [("k8v4", "k4v2"), ("bf16",), ("k8v4c", "k4v2_g24", "k1v1", "k2v8_g82c")], ids="-".join
)
def test_scores_are_refreshed_where_due(tiers: tuple[str, ...]) -> None:
    slow, _ = pair(tiers, (301, 4, 240), refresh=4, rank=2)
    slow.horizon = torch.tensor([64, 3, 2**31 - 1])
    quick, before = twin(slow), twin(slow)
    attend(slow, quick, 3)
    slots = torch.arange(3)
    _, valid = window_positions(slow, slots, slow.seen)
    valid = valid[:, None, None].expand_as(slow.window_score)
    torch.testing.assert_close(quick.window_score[valid], slow.window_score[valid], rtol=1e-4, atol=1e-8)
    assert (tier_scores(slow) - tier_scores(quick)).abs().max() <= 1
    assert not torch.equal(tier_scores(quick), tier_scores(before))
    sinks = quick.window_score[..., :4] == before.window_score[..., :4]
    assert sinks[0].all()
    assert not sinks[2].any()


def weigh_and_skip(state: CacheState, seed: int) -> int:
    """Random log-weights for half of all tokens; a third of the pages, partly filled ones too, are skipped. Returns how
    many.
    """
    g = torch.Generator().manual_seed(seed)
    weights, slots = pool_as(state, torch.float32), torch.arange(len(state.seen))
    for layer in range(state.lengths.shape[1]):
        for tier in range(len(state.layouts)):
            index, page, valid = tier_tokens(state, layer, slots, tier)
            at = weight_addresses(state, tier, page, index.expand_as(page))[valid]
            assert bool((weights[at] == 0).all()), "new tokens have no log-weight"
            weights[at] = torch.randn(len(at), generator=g) * (torch.rand(len(at), generator=g) < 0.5) * 2
    chosen = (torch.rand(state.page_skip.shape, generator=g) < 0.3) & (state.page_table >= 0)
    state.page_skip.copy_(chosen)
    return int(chosen.sum())


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("dim", [64, 80])
def test_weights_skipped_pages_and_the_query_ring_agree(tiers: tuple[str, ...], dim: int) -> None:
    group, dtype = SHAPES[dim]
    options = {"weights": True, "skips": True, "query_rows": 5, "group": group, "refresh": 4}
    slow, _ = pair(tiers, (301, 4, 240), dim=dim, dtype=dtype, rank=2, **options)
    assert weigh_and_skip(slow, dim) > 5
    quick, before = twin(slow), twin(slow)
    attend(slow, quick, group)
    assert (tier_scores(slow) - tier_scores(quick)).abs().max() <= 1
    assert not torch.equal(tier_scores(quick), tier_scores(before))
    assert torch.equal(slow.queries, quick.queries)
    written = (slow.queries != 0).flatten(3).any(-1)  # [S, L, W]
    assert torch.equal(written.long().argmax(-1), (slow.seen % 5)[:, None].expand(-1, 2))
    assert bool((written.sum(-1) == 1).all())


def test_votes_and_weights_move_with_their_tokens() -> None:
    slow, _ = pair(("k8v4", "k4v4", "k4v2"), (120, 90, 37), weights=True, skips=True)
    weigh_and_skip(slow, 1)
    slow.alpha = torch.rand(slow.alpha.shape, generator=torch.Generator().manual_seed(0))
    slow.catch_up = torch.tensor([1, 0, 1])
    quick = twin(slow)
    sift(slow, quick, 3, 12)
    assert torch.equal(slow.page_skip, quick.page_skip)
    assert not bool(((quick.page_skip > 0) & (quick.page_table < 0)).any())


def test_results_do_not_depend_on_the_batch() -> None:
    _, quick = pair(("k8v4", "k4v2"), (1500, 700, 37), pages=1200, width=120)
    alone, group, dim = twin(quick), 3, 64
    q = torch.randn(3, 3 * group, dim)
    k, v = torch.randn(3, 3, dim), torch.randn(3, 3, dim)
    together = fast.decode_attention(quick, 0, torch.arange(3), q, k, v)
    for slot in range(3):
        one = fast.decode_attention(
            alone, 0, torch.tensor([slot]), q[slot : slot + 1], k[slot : slot + 1], v[slot : slot + 1]
        )
        assert torch.equal(one[0], together[slot])


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("scale", [1.0, 1e5, 1e-5])
def test_append_tokens_is_the_same_to_the_bit(tiers: tuple[str, ...], scale: float) -> None:
    slow = make_state(tiers, dim=24 if len(tiers) == 3 else 64, rank=2, dtype=torch.float32)
    quick, g = twin(slow), torch.Generator().manual_seed(3)
    for turn, count in enumerate((0, 1, 143)):
        k, v = (torch.randn(count, 3, slow.window_k.shape[-1], generator=g) * scale for _ in range(2))
        v[count // 2 :] *= 1e-3
        v[::3, :, 5] *= 25
        k[: count // 4] = 0.5
        score, position = torch.rand(3, count, generator=g) ** 6 * 1.1, torch.arange(count) + 7 * turn
        tier = random_tiers(3, count, TIERS[tiers], g)
        for body, state in ((reference, slow), (fast, quick)):
            body.append_tokens(state, 1, turn, k, v, score, position, tier)
            body.append_tokens(state, 0, turn, k, v, score, position, tier)
    assert_same(slow, quick)


def sift(slow: CacheState, quick: CacheState, seed: int, steps: int) -> int:
    """Random steps on both; returns how often a request was not served."""
    order, refused = random.Random(seed), 0
    _, layers, heads, _, dim = slow.window_k.shape
    for step in range(steps):
        slots = torch.tensor(order.sample(range(3), order.choice([1, 2, 3, 3])))
        for state in (slow, quick):
            g = torch.Generator().manual_seed(100 * seed + step)
            for layer in range(layers):
                k, v = (torch.randn(len(slots), heads, dim, generator=g) for _ in range(2))
                append_to_window(state, layer, slots, k, v)
            state.window_score.copy_(torch.rand(state.window_score.shape, generator=g) ** 3 * 0.03)
        served = reference.sift_step(slow, slots)
        assert torch.equal(fast.sift_step(quick, slots), served)
        refused += int((~served).sum())
        assert_same(slow, quick)
    return refused


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("seed", [0, 1])
def test_sift_steps_are_the_same_to_the_bit(tiers: tuple[str, ...], seed: int) -> None:
    dim, (_, dtype) = [(80, SHAPES[80]), (64, SHAPES[64])][seed]
    slow, _ = pair(tiers, (120, 90, 37), dim=dim, dtype=dtype, rank=2 * seed, seed=seed)
    g = torch.Generator().manual_seed(seed)
    slow.alpha = torch.rand(slow.alpha.shape, generator=g) * 2
    slow.cap = torch.randint(0, 60, slow.cap.shape, generator=g).to(torch.int32)
    share = torch.rand(slow.cap_share.shape, generator=g)
    slow.cap_share = torch.where(share < 0.5, share * 0.6 - 0.01, torch.inf)
    slow.catch_up = torch.tensor([0, 2, 1])
    lengths = slow.lengths.clone()
    sift(slow, twin(slow), seed, 10)
    assert not torch.equal(lengths, slow.lengths)


@pytest.mark.parametrize("seed", range(3))
def test_sift_steps_agree_when_pages_run_out(seed: int) -> None:
    tiers = ("k8v4", "k4v4", "k4v2")
    held = int(pair(tiers, (120, 90, 37))[0].counters[0])
    slow, _ = pair(tiers, (120, 90, 37), pages=held + 4, seed=seed, ring=64)
    g = torch.Generator().manual_seed(seed)
    slow.alpha = torch.rand(slow.alpha.shape, generator=g)
    slow.catch_up = torch.tensor([1, 0, 2])
    assert sift(slow, twin(slow), seed, 30) > 0


def test_the_rest_is_the_same() -> None:
    slow, quick = pair(("k8v4", "k4v2"))
    for body, state in ((reference, slow), (fast, quick)):
        body.release(state, torch.tensor([0, 2]))
        g = torch.Generator().manual_seed(1)
        k, v = (torch.randn(30, 3, 64, generator=g).bfloat16() for _ in range(2))
        body.write_window(state, 1, 0, k, v, torch.rand(3, 30, generator=g), torch.arange(30))
    assert_same(slow, quick)


@pytest.mark.parametrize(
    ("tokens", "heads", "group", "dim", "dtype"),
    [
        (1, 3, 3, 64, torch.bfloat16),
        (50, 3, 1, 16, torch.float32),
        (333, 2, 3, 64, torch.bfloat16),
        (700, 1, 7, 80, torch.float16),
    ],
)
@pytest.mark.parametrize("every", [1, 7])
def test_prompt_importance_agrees(
    tokens: int, heads: int, group: int, dim: int, dtype: torch.dtype, every: int
) -> None:
    g = torch.Generator().manual_seed(tokens)
    q, k = ((torch.randn(tokens, n, dim, generator=g) * 1.5).to(dtype) for n in (heads * group, heads))
    rows = torch.arange(tokens - 1, -1, -every).flip(0)
    weight = torch.rand(len(rows), generator=g) * 5 + 0.1
    expected = reference.prompt_importance(q, k, rows, weight)
    precision = torch.backends.mkldnn.matmul.fp32_precision
    torch.testing.assert_close(fast.prompt_importance(q, k, rows, weight), expected, rtol=2e-5, atol=1e-8)
    assert torch.backends.mkldnn.matmul.fp32_precision == precision


@pytest.mark.parametrize(
    ("tokens", "heads", "group", "dim", "dtype"),
    [
        (1, 3, 3, 64, torch.bfloat16),
        (50, 3, 1, 16, torch.float32),
        (333, 2, 3, 64, torch.bfloat16),
        (700, 1, 7, 80, torch.float16),
    ],
)
def test_prompt_importance_takes_sums_that_attention_left(
    tokens: int, heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(tokens)
    q, k, v = ((torch.randn(tokens, n, dim, generator=g) * 1.5).to(dtype) for n in (heads * group, heads, heads))
    out, lse = causal_attention(q, k, v)
    assert lse is not None
    wanted = [x.transpose(0, 1)[None].float() for x in (q, k, v)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*wanted, is_causal=True, enable_gqa=True)[0]
    torch.testing.assert_close(out.float(), wanted.transpose(0, 1), rtol=2e-2, atol=2e-2)
    rows = torch.arange(tokens - 1, -1, -3).flip(0)
    weight = torch.rand(len(rows), generator=g) * 5 + 0.1
    expected = reference.prompt_importance(q, k, rows, weight)
    torch.testing.assert_close(fast.prompt_importance(q, k, rows, weight, lse), expected, rtol=5e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_views_of_a_fused_projection_are_kept(dtype: torch.dtype) -> None:
    """Rows that are not contiguous, a ring that wraps, and tiers of the model's type and of another one."""
    slow = make_state(("bf16", "fp32", "k8v4"), dtype=dtype, rank=2)
    quick, g = twin(slow), torch.Generator().manual_seed(3)
    qkv = torch.randn(140, 9, 64, generator=g).to(dtype)
    k, v, score = qkv[:, 3:6], qkv[:, 6:], torch.rand(3, 140, generator=g) ** 4
    tier, position = random_tiers(3, 100, (0.3, 0.2, 0.3), g), torch.arange(140)
    for body, state in ((reference, slow), (fast, quick)):
        for part in (slice(0, 4), slice(100, 140)):
            body.write_window(state, 1, 2, k[part], v[part], score[:, part], position[part])
        body.append_tokens(state, 1, 2, k[:100], v[:100], score[:, :100], position[:100], tier)
    assert_same(slow, quick)
