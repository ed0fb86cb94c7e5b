"""The GPU's rewrite and decode attention of Hard-KV requests against the reference bodies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from siftkv.cache import KVCache
from siftkv.kernels import reference
from siftkv.kernels.state import CacheState
from tests.gpu.hardkv_helpers import HEADS, LAYERS, candidates, hard_cache, rule_for, twin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def same_tokens(ours: KVCache, theirs: KVCache, slot: int, encoded: bool) -> None:
    for layer in range(LAYERS):
        mine, other = ours.tokens(layer, slot, values=True), theirs.tokens(layer, slot, values=True)
        for name in ("position", "tier", "index", "votes", "weight", "score"):
            assert torch.equal(getattr(mine, name), getattr(other, name)), name
        assert mine.v is not None
        assert other.v is not None
        for x, y in ((mine.k, other.k), (mine.v, other.v)):
            if encoded:
                assert float((x - y).norm() / y.norm().clamp_min(1e-6)) < 8e-3
            else:
                assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("formats", "weights", "bias"),
    [(("bf16",), False, False), (("bf16",), True, False), (("bf16", "k8v4"), True, True), (("k8v4",), False, False)],
)
def test_a_rewrite_is_the_generic_one(formats: tuple[str, ...], weights: bool, bias: bool) -> None:
    from siftkv.kernels import cuda

    torch.manual_seed(4)
    ours = hard_cache(formats, weights=weights, bias=bias, skips=True)
    target, sources = len(formats) - 1, tuple(reversed(range(len(formats))))
    ours.skip_pages(0, 0, ours.tokens(0, 0), torch.zeros_like(ours.tokens(0, 0).tier, dtype=torch.bool))
    for slot in range(5):
        longest = int(ours.state.lengths[slot].sum(-1).max())
        keep = (torch.rand(LAYERS, HEADS, longest + 1, device="cuda") < 0.3).to(torch.uint8)
        keep[1, 1] = slot % 2
        theirs = twin(ours)
        assert bool(cuda.rewrite(ours.state, slot, keep, target, sources))
        for layer in range(LAYERS):
            tokens, kept = candidates(theirs, layer, slot, keep)
            theirs.rewrite(layer, slot, tokens, kept, target)
        ours.check_integrity()
        assert ours.free_pages == theirs.free_pages
        same_tokens(ours, theirs, slot, encoded=len(formats) > 1)
        assert torch.equal(ours.state.page_skip, theirs.state.page_skip)


def test_a_rewrite_that_finds_too_few_pages_changes_nothing() -> None:
    from siftkv.kernels import cuda

    torch.manual_seed(5)
    cache = hard_cache(("bf16", "k8v4"), lengths=(1000, 1200))
    state = cache.state
    free = cache.free_pages
    state.counters[0] += free - 1
    before = twin(cache).state
    keep = torch.ones(LAYERS, HEADS, 2000, dtype=torch.uint8, device="cuda")
    assert not bool(cuda.rewrite(state, 0, keep, 1, (1, 0)))
    for name in ("pages", "page_table", "lengths", "counters", "free_ring"):
        assert torch.equal(getattr(state, name), getattr(before, name)), name
    state.counters[0] -= free - 1
    assert bool(cuda.rewrite(state, 0, keep, 1, (1, 0)))
    cache.check_integrity()


def attend(state: CacheState, body: object, slots: Tensor, seed: int, group: int) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(seed)
    out, dim = [], state.window_k.shape[-1]
    for layer in range(LAYERS):
        q = torch.randn(len(slots), HEADS * group, dim, device="cuda", generator=g).to(state.window_k.dtype)
        k, v = torch.randn(2, len(slots), HEADS, dim, device="cuda", generator=g).to(state.window_k.dtype)
        out.append(body.decode_attention(state, layer, slots, q, k, v))  # type: ignore[attr-defined]
    return out


def relative(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


@pytest.mark.parametrize("formats", [("bf16",), ("bf16", "k8v4"), ("k4v2",)])
@pytest.mark.parametrize(
    "options", [{"weights": True}, {"skips": True}, {"weights": True, "skips": True, "bias": True}]
)
def test_attention_with_log_weights_skipped_pages_and_a_query_ring(
    formats: tuple[str, ...], options: dict[str, bool]
) -> None:
    from siftkv.kernels import cuda

    torch.manual_seed(6)
    cache = hard_cache(formats, group=3, **options)  # type: ignore[arg-type]
    if options.get("skips"):
        for slot in range(5):
            for layer in range(LAYERS):
                tokens = cache.tokens(layer, slot)
                cache.skip_pages(layer, slot, tokens, torch.rand(tokens.position.shape, device="cuda") < 0.01)
        assert bool(cache.state.page_skip.any())
    slots = torch.tensor([3, 0, 4, 2, 1], device="cuda")
    for step in range(9):
        ours = twin(cache)
        expected = attend(cache.state, reference, slots, step, 3)
        for x, y in zip(attend(ours.state, cuda, slots, step, 3), expected, strict=True):
            assert relative(x, y) < 8e-3
        assert torch.equal(ours.state.queries, cache.state.queries)
        for layer in range(LAYERS):
            for slot in range(5):
                mine, theirs = ours.tokens(layer, slot).score, cache.tokens(layer, slot).score
                assert torch.allclose(mine, theirs, rtol=0.02, atol=2e-6)
        cache.step(slots)


def test_a_captured_step_goes_on_after_a_rewrite_and_tokens_that_came_meanwhile_stay() -> None:
    from siftkv.kernels import cuda

    torch.manual_seed(7)
    cache = hard_cache(("bf16",), lengths=(900, 1300, 400))
    state, slots = cache.state, torch.arange(3, device="cuda")
    inputs = [torch.randn(3, n, 128, device="cuda", dtype=torch.bfloat16) for n in (4 * HEADS, HEADS, HEADS)]

    def step() -> list[Tensor]:
        out = [cuda.decode_attention(state, layer, slots, *inputs) for layer in range(LAYERS)]
        cuda.sift_step(state, slots, False)
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    selected, at = cuda.select(state, 1, rule_for(cache, p=0.7)), state.lengths[1].clone()
    for _ in range(40):
        graph.replay()
    length, later = state.lengths[1].clone(), int(state.seen[1]) - 40 - 24
    assert bool(cuda.rewrite(state, 1, selected.keep, 0, (0,), at))
    assert torch.equal(state.lengths[1] - selected.kept[..., None], length - at)
    cache.check_integrity()
    newest = cache.tokens(1, 1).position
    assert all(later + i in newest[head].tolist() for head in range(HEADS) for i in range(30))
    for _ in range(3):
        twin_cache = twin(cache)
        graph.replay()
        for layer in range(LAYERS):
            expected = reference.decode_attention(twin_cache.state, layer, slots, *inputs)
            assert relative(captured[layer], expected) < 8e-3
    cache.check_integrity()
    cache.release([0, 1, 2])
    assert cache.free_pages == cache.spec.num_pages
