"""Reading what heads keep in time order, and rewriting it, against a plain model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from siftkv.cache import KVCache
from siftkv.cache.compaction import IN_WINDOW
from siftkv.errors import FormatError, OutOfPages, SiftKVError
from siftkv.kernels.reference.quantize import decode
from siftkv.kernels.reference.tokens import page_of, read_records
from tests.compaction_helpers import (
    DIM,
    HEADS,
    LAYERS,
    attend,
    masked_attention,
    newest,
    opened,
    some,
    with_newest,
)
from tests.tiny import random_prompt, random_step, small_cache


@pytest.fixture(params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def records_of(cache: KVCache, layer: int, slot: int, head: int) -> dict[int, tuple[int, Tensor]]:
    """Tier and record of every token in tiers, by position, in the order of (tier, index)."""
    state, found = cache.state, {}
    for tier, layout in enumerate(cache.spec.layouts):
        index = torch.arange(int(state.lengths[slot, layer, head, tier]))
        record = read_records(state, tier, page_of(state, state.page_table[slot, layer, head], tier, index), index)
        for position, own in zip(decode(layout, record)[3].tolist(), record):
            assert position not in found
            found[position] = (tier, own)
    return found


def test_tokens_are_all_that_was_stored_in_time_order(kernels: str) -> None:
    cache, policy, _, generator = opened(1, kernels=kernels)
    slot = cache.admit(policy.rule)
    history = random_prompt(cache, policy, slot, 37, generator)
    for _ in range(20):
        for layer, (_, k, v, _) in enumerate(random_step(cache, [slot], generator)):
            history[layer] = tuple(torch.cat([old, new]) for old, new in zip(history[layer], (k, v)))  # type: ignore[call-overload]
    for layer in range(LAYERS):
        tokens = cache.tokens(layer, slot, values=True)
        assert torch.equal(tokens.position, torch.arange(57).expand(HEADS, -1))
        assert tokens.v is not None
        for held, stored in zip((tokens.k, tokens.v), history[layer]):
            torch.testing.assert_close(held, stored.transpose(0, 1), rtol=0, atol=0)
        window = (torch.arange(57) < 2) | (torch.arange(57) >= 53)
        assert torch.equal(tokens.tier == IN_WINDOW, window.expand(HEADS, -1))
        assert torch.equal(tokens.index[~window.expand(HEADS, -1)], torch.arange(51).repeat(HEADS))


def test_a_request_without_tokens_has_none() -> None:
    cache, policy, *_ = opened()
    assert cache.tokens(0, cache.admit(policy.rule)).position.shape == (HEADS, 0)


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    length=st.integers(1, 100),
    seed=st.integers(0, 10**6),
    rounds=st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1), st.integers(0, 10)), min_size=1, max_size=3),
    bias=st.sampled_from([0.0, 4.0]),
    kernels=st.sampled_from(["reference", "numba"]),
)
def test_rewrites_follow_a_plain_model(
    length: int, seed: int, rounds: list[tuple[int, float, int]], bias: float, kernels: str
) -> None:
    """Any keeps, tiers and lengths, again and again, with decode steps between them."""
    cache, policy, slot, generator = opened(length, seed, 1, bias=bias, kernels=kernels, max_len=512)
    other = cache.admit(policy.rule)
    random_prompt(cache, policy, other, 33, generator)
    for target, share, steps in rounds:
        for layer in range(LAYERS):
            rewrite_like_the_model(cache, layer, slot, generator, target, share)
        for _ in range(steps):
            random_step(cache, [slot, other], generator)
        cache.check_integrity()
    cache.release([slot, other])
    cache.check_integrity()
    assert cache.free_pages == cache.spec.num_pages


def rewrite_like_the_model(
    cache: KVCache, layer: int, slot: int, generator: torch.Generator, target: int, share: float
) -> None:
    tokens = cache.tokens(layer, slot)
    votes = torch.randint(0, 80000, tokens.position.shape, generator=generator, dtype=torch.int32)
    cache.write_votes(layer, slot, tokens, votes, tokens.score)
    keep = some(tokens, generator, share)
    before = [records_of(cache, layer, slot, head) for head in range(HEADS)]
    kept = [set(tokens.position[head][keep[head]].tolist()) for head in range(HEADS)]
    cache.rewrite(layer, slot, tokens, keep, target)
    cache.check_integrity()
    after, told = [records_of(cache, layer, slot, head) for head in range(HEADS)], cache.tokens(layer, slot)
    old_votes = [dict(zip(tokens.position[h].tolist(), votes[h].clamp(max=65535).tolist())) for h in range(HEADS)]
    for head in range(HEADS):
        expected = sorted(kept[head] & before[head].keys())
        assert list(after[head]) == expected
        assert all(tier == target for tier, _ in after[head].values())
        for tier in range(len(cache.spec.tiers)):
            own = [p for p in expected if before[head][p][0] == tier]
            pairs = [(before[head][p][1], after[head][p][1]) for p in own]
            if pairs and tier == target:
                assert all(torch.equal(old, new) for old, new in pairs)
            elif pairs:
                check_moved(cache, layer, head, tier, *(torch.stack(x) for x in zip(*pairs)))
        counted = {
            p: v for p, t, v in zip(*(x[head].tolist() for x in (told.position, told.tier, told.votes))) if t >= 0
        }
        assert counted == {p: old_votes[head][p] for p in expected}


def check_moved(cache: KVCache, layer: int, head: int, tier: int, old: Tensor, new: Tensor) -> None:
    """Records `[n, bytes]` that went from `tier` to the other one: keys conditioned or made plain, scores, positions,
    votes and weights as they were.
    """
    c, target = cache.state.conditioning, 1 - tier
    k, v, _, position = decode(cache.spec.layouts[tier], old)
    bias, half = c.bias[layer, head], DIM // 2
    cos, sin = c.cos[position], c.sin[position]
    turned = torch.cat([bias[:half] * cos - bias[half:] * sin, bias[half:] * cos + bias[:half] * sin], -1)
    k = (k - turned) @ c.rotation if target else k @ c.rotation.T + turned
    kept = decode(cache.spec.layouts[target], new)
    torch.testing.assert_close(kept[0], k, rtol=0, atol=0.1 if target else 1e-5)
    torch.testing.assert_close(kept[1], v, rtol=0, atol=0.3 if target else 1e-5)
    assert torch.equal(new[:, -12:], old[:, -12:])


@pytest.mark.parametrize("source", [0, 1])
def test_attention_over_rewritten_pages_is_masked_attention(source: int, kernels: str) -> None:
    cache, _, slot, generator = opened(90, kernels=kernels)
    tokens = cache.tokens(0, slot)
    cache.rewrite(0, slot, tokens, torch.ones_like(tokens.position, dtype=torch.bool), source)
    tokens = cache.tokens(0, slot, values=True)
    keep = some(tokens, generator, 0.4) | (tokens.tier == IN_WINDOW)
    cache.rewrite(0, slot, tokens, keep, source)
    q, out = attend(cache, slot, generator)
    every = with_newest(tokens, *newest(cache, slot))
    keep = torch.cat([keep, torch.ones(HEADS, 1, dtype=torch.bool)], 1)
    torch.testing.assert_close(out, masked_attention(every, q, keep), rtol=1e-5, atol=1e-6)


def test_a_rewrite_that_does_not_fit_changes_nothing() -> None:
    cache, policy, slot, generator = opened(120, num_pages=25)
    tokens = cache.tokens(0, slot)
    cache.rewrite(0, slot, tokens, torch.ones_like(tokens.position, dtype=torch.bool), 1)
    random_prompt(cache, policy, cache.admit(policy.rule), 40, generator)
    tokens = cache.tokens(0, slot)
    pages, table, lengths = (x.clone() for x in (cache.state.pages, cache.state.page_table, cache.state.lengths))
    with pytest.raises(OutOfPages, match="rewriting layer 0"):
        cache.rewrite(0, slot, tokens, torch.ones_like(tokens.position, dtype=torch.bool), 0)
    for was, now in zip((pages, table, lengths), (cache.state.pages, cache.state.page_table, cache.state.lengths)):
        assert torch.equal(was, now)
    cache.rewrite(0, slot, tokens, some(tokens, generator, 0.9), 1)
    cache.check_integrity()


def test_what_a_pool_cannot_do_is_named() -> None:
    cache, [policy] = small_cache(["uniform:k8v4,window=4"])
    slot = cache.admit(policy.rule)
    random_prompt(cache, policy, slot, 30, torch.Generator().manual_seed(0))
    with pytest.raises(FormatError, match="no positions"):
        cache.tokens(0, slot)
    cache, [policy] = small_cache(["diffkv:window=4"])
    slot = cache.admit(policy.rule)
    random_prompt(cache, policy, slot, 30, torch.Generator().manual_seed(0))
    tokens = cache.tokens(0, slot)
    every = torch.ones_like(tokens.position, dtype=torch.bool)
    with pytest.raises(SiftKVError, match="skip"):
        cache.skip_pages(0, slot, tokens, every)
    with pytest.raises(FormatError, match="log-weights"):
        cache.rewrite(0, slot, tokens, every, 0, {"changed": every})
