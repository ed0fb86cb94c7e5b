"""Log-weights and skipped pages in decode attention, and where they go."""

from __future__ import annotations

import pytest
import torch

from siftkv.cache.compaction import IN_WINDOW
from siftkv.errors import IntegrityError
from tests.compaction_helpers import (
    DIM,
    GROUP,
    HEADS,
    LAYERS,
    attend,
    masked_attention,
    merge_some,
    newest,
    opened,
    skip_some,
    some,
    with_newest,
)
from tests.tiny import classified, random_prompt


@pytest.fixture(params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("target", [0, 1])
def test_log_weights_count_in_attention(target: int, kernels: str) -> None:
    cache, _, slot, generator = opened(90, kernels=kernels, bias=2.0)
    tokens = merge_some(cache, slot, generator, target)
    q, out = attend(cache, slot, generator)
    every = with_newest(tokens, *newest(cache, slot))
    expected = masked_attention(every, q, torch.ones_like(every.position, dtype=torch.bool))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_log_weight_stands_for_that_many_equal_tokens(kernels: str) -> None:
    cache, policy, _, generator = opened(9, kernels=kernels)
    k, v = (torch.randn(1, HEADS, DIM, generator=generator).expand(30, -1, -1) for _ in range(2))
    q = torch.randn(30, HEADS * GROUP, DIM, generator=generator)
    other = cache.admit(policy.rule)
    score = torch.zeros(HEADS, 30)
    for layer in range(LAYERS):
        cache.store_prompt(layer, other, k, v, score, classified(cache, policy, layer, other, score, q, k, v))
    cache.finish_prompt(other, 30)
    tokens = cache.tokens(0, other, values=True)
    assert tokens.v is not None
    keep = tokens.position == 7
    weight = torch.full(score.shape, 24.0).log()
    state = torch.Generator().manual_seed(9)
    _, before = attend(cache, other, state)
    cache.rewrite(
        0, other, tokens, keep, 0, {"changed": keep, "k": tokens.k, "v": tokens.v, "weight": weight, "score": score}
    )
    assert int(cache.state.lengths[other, 0].sum()) == HEADS
    _, after = attend(cache, other, torch.Generator().manual_seed(9))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", [0, 1])
def test_skipped_pages_take_no_part(target: int, kernels: str) -> None:
    cache, _, slot, generator = opened(240, kernels=kernels, refresh=1, page_bytes=1024)
    first = cache.tokens(0, slot)
    cache.rewrite(0, slot, first, torch.ones_like(first.position, dtype=torch.bool), target)
    tokens, seen = skip_some(cache, slot, generator)
    assert 0 < int(seen.sum()) < seen.numel()
    q, out = attend(cache, slot, generator)
    every = with_newest(tokens, *newest(cache, slot))
    seen = torch.cat([seen, torch.ones(HEADS, 1, dtype=torch.bool)], 1)
    torch.testing.assert_close(out, masked_attention(every, q, seen), rtol=1e-5, atol=1e-6)
    now = cache.tokens(0, slot)
    same = now.score[:, : tokens.score.shape[1]] == tokens.score
    stored = tokens.tier >= 0
    assert bool(same[stored & ~seen[:, :-1]].all()), "what attention does not see keeps its score"
    assert float(same[stored & seen[:, :-1]].float().mean()) < 0.2


def test_a_long_stretch_of_skipped_pages(kernels: str) -> None:
    """More skipped tokens than one work item of the compiled kernel holds."""
    cache, _, slot, generator = opened(2600, kernels=kernels, max_len=2700, num_pages=2000)
    tokens = cache.tokens(0, slot, values=True)
    cache.skip_pages(0, slot, tokens, torch.zeros_like(tokens.position, dtype=torch.bool))
    q, out = attend(cache, slot, generator)
    every = with_newest(tokens, *newest(cache, slot))
    full = cache.spec.layouts[0].tokens * (int(cache.state.lengths[slot, 0, 0, 0]) // cache.spec.layouts[0].tokens)
    seen = (every.tier == IN_WINDOW) | (every.index >= full)
    torch.testing.assert_close(out, masked_attention(every, q, seen), rtol=1e-5, atol=1e-6)


def test_flags_go_with_their_pages() -> None:
    cache, _, slot, generator = opened(240, page_bytes=1024)
    tokens, _ = skip_some(cache, slot, generator)
    assert bool(cache.state.page_skip[slot].any())
    cache.rewrite(0, slot, tokens, some(tokens, generator, 0.5), 1)
    assert not bool(cache.state.page_skip.any())
    tokens, _ = skip_some(cache, slot, generator)
    cache.release([slot])
    assert not bool(cache.state.page_skip.any())
    cache.state.page_skip[0, 0, 0, 0, 0] = 1
    with pytest.raises(IntegrityError, match="skipped"):
        cache.check_integrity()


def test_swap_brings_back_flags_votes_and_weights(kernels: str) -> None:
    cache, policy, slot, generator = opened(240, kernels=kernels, page_bytes=1024)
    merge_some(cache, slot, generator, 1)
    tokens, _ = skip_some(cache, slot, generator)
    cache.write_votes(0, slot, tokens, tokens.position.int() + 3)
    tokens, flags = cache.tokens(0, slot), cache.state.page_skip[slot].clone()
    swapped = cache.swap_out(slot)
    slot = cache.admit(policy.rule)
    random_prompt(cache, policy, slot, 50, generator)
    slot = cache.swap_in(swapped)
    now = cache.tokens(0, slot)
    assert torch.equal(cache.state.page_skip[slot], flags)
    for name in ("position", "votes", "weight", "score", "k"):
        assert torch.equal(getattr(now, name), getattr(tokens, name)), name
    assert torch.equal(now.votes[now.tier >= 0], (now.position[now.tier >= 0] + 3).int())
    cache.check_integrity()
