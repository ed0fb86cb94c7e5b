"""The GPU's selection of Hard-KV against the exact rule, and against bounds of what votes may be."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from siftkv.cache import KVCache, compaction
from siftkv.errors import FormatError
from siftkv.kernels.cuda import select_room
from siftkv.kernels.cuda.select_room import Room
from siftkv.kernels.state import SELECTION_TENSORS, SelectionRule
from tests.gpu.hardkv_helpers import (
    HEADS,
    LAYERS,
    candidates,
    hard_cache,
    layer_tokens,
    rule_for,
    twin,
    vote_bounds,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = {
    "plain": {},
    "group 1": {"group": 1},
    "group 7": {"group": 7},
    "group 8": {"group": 8, "dim": 64},
    "weights": {"weights": True},
    "fp16 head_dim 80": {"formats": ("fp16",), "dim": 80, "group": 3},
    "quantised": {"formats": ("bf16", "k8v4")},
    "quantised, weights, key bias": {"formats": ("bf16", "k8v4"), "weights": True, "bias": True, "group": 2},
}


def check_selection(cache: KVCache, slot: int, rule: SelectionRule, noise: float, stored: bool = False) -> None:
    """stored: buckets of logits are kept between the halves of the selection, for which there is `room_for`."""
    from siftkv.kernels import cuda

    before = [layer_tokens(cache, layer, slot) for layer in range(LAYERS)]
    found = cuda.select(cache.state, slot, rule)
    for layer, tokens in enumerate(before):
        after, kept = candidates(cache, layer, slot, found.keep)
        least, most = vote_bounds(tokens, rule, noise)
        votes = after.votes.long() * tokens.candidate
        assert (votes >= least).all(), f"{(votes < least).sum()} tokens have too few votes"
        assert (votes <= most).all(), f"{(votes > most).sum()} tokens have too many votes"
        assert torch.equal(kept, votes > 0)
        assert torch.equal(kept.sum(-1).int(), found.kept[layer])
        check_mass(tokens, after, kept, found.mass[layer], rule, stored)


def check_mass(
    tokens: object, after: compaction.HeadTokens, kept: Tensor, mass: Tensor, rule: SelectionRule, stored: bool
) -> None:
    from siftkv.policies.hardkv.metrics import Attention
    from siftkv.policies.hardkv.selection import coverage, vote

    exact = vote(tokens, rule.p, Attention())  # type: ignore[arg-type]
    if rule.metric != "accumulated" and not stored:
        close = torch.isclose(after.score, exact.mass, rtol=0.1, atol=2e-6)
        assert close[after.tier >= 0].all()
    stays = coverage(exact.share, kept | (after.tier == compaction.IN_WINDOW))
    assert torch.allclose(mass, stays, atol=2e-2 if stored else 6e-3)
    if rule.metric == "attention":
        assert (mass >= rule.p - (2e-2 if stored else 1e-3)).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("metric", "p"), [("attention", 0.9), ("attention", 0.5), ("snapkv", 0.9), ("accumulated", 0.8)]
)
def test_votes_lie_between_what_the_exact_rule_needs_and_its_stated_excess(case: str, metric: str, p: float) -> None:
    torch.manual_seed(0)
    options = CASES[case]
    cache = hard_cache(**options)  # type: ignore[arg-type]
    noise = 0.08 if len(cache.spec.tiers) > 1 else 0.01
    for slot in range(5):
        check_selection(cache, slot, rule_for(cache, metric, p), noise)


def room_for(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> Room:
    """Room for buckets, however small the pool is, with what nobody has written in it."""
    monkeypatch.setattr(select_room, "_POOL_SHARE", 1e-3)
    room = select_room.room_of(cache.state, 1)
    assert room is not None
    room.buckets.fill_(255)
    return room


@pytest.mark.parametrize("case", ["plain", "group 1", "group 7", "group 8"])
@pytest.mark.parametrize(("metric", "p"), [("attention", 0.9), ("attention", 0.5), ("snapkv", 0.9), ("snapkv", 0.6)])
@pytest.mark.parametrize("drops", [True, False])
def test_votes_of_stored_buckets_lie_between_the_same_bounds(
    case: str, metric: str, p: float, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    cache = hard_cache(**CASES[case], drops=drops)  # type: ignore[arg-type]
    room = room_for(cache, monkeypatch)
    for slot in range(5):
        check_selection(cache, slot, rule_for(cache, metric, p), 0.01, stored=True)
    assert not room.taken.any()
    assert cache.usage().workspace >= room.buckets.numel()


@pytest.mark.parametrize("metric", ["attention", "snapkv"])
def test_room_serves_heads_that_it_holds_without_a_budget(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from siftkv.kernels import cuda

    torch.manual_seed(4)
    cache = hard_cache(lengths=(700, 3100))
    room, rule = room_for(cache, monkeypatch), rule_for(cache, metric)
    assert room.holds(3100)
    monkeypatch.setattr(select_room, "MOST_TOKENS", 1000)
    del cache.state.scratch["cuda_select_room"]
    room = room_for(cache, monkeypatch)
    assert room.holds(1000)
    assert not room.holds(3100)
    for longest, budget, writes in ((700, 1 << 20, True), (700, 300, False), (3100, 1 << 20, False)):
        room.buckets.fill_(255)
        cuda.select(cache.state, int(longest > 1000), dataclasses.replace(rule, budget=budget), longest=longest)
        assert bool((room.buckets != 255).any()) == writes


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("pool", [1, 3, 5, 9])
def test_neighbours_are_told_by_position(pool: int, stored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    cache = hard_cache(group=2)
    if stored:
        room_for(cache, monkeypatch)
    check_selection(cache, 0, rule_for(cache, "snapkv", 0.7, pool), 0.01, stored)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("metric", ["attention", "snapkv"])
@pytest.mark.parametrize(("page_tokens", "drops", "dim"), [(8, True, 128), (32, True, 64), (64, False, 128)])
def test_pages_of_any_size_and_tokens_without_gaps(
    metric: str, page_tokens: int, drops: bool, dim: int, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    cache = hard_cache(page_tokens=page_tokens, drops=drops, dim=dim, lengths=(3100, 191), pages=8000)
    assert cache.state.layouts[0].tokens == page_tokens
    stored = stored and not (metric == "snapkv" and page_tokens == 8)  # which tensor maps do not bring
    if stored:
        room_for(cache, monkeypatch)
    for slot in range(2):
        check_selection(cache, slot, rule_for(cache, metric), 0.01, stored)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("metric", ["attention", "snapkv", "accumulated"])
def test_everything_stays_when_all_mass_is_asked_for(
    metric: str, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    cache = hard_cache()
    if stored:
        room_for(cache, monkeypatch)
    check_selection(cache, 0, rule_for(cache, metric, 1.0), 0.01, stored)


def test_a_cap_takes_the_best_by_votes_then_mass() -> None:
    from siftkv.kernels import cuda

    torch.manual_seed(3)
    cache = hard_cache(group=2)
    cuda.select(cache.state, 0, rule_for(cache, p=0.6))  # votes of an earlier trigger
    found = cuda.select(cache.state, 0, rule_for(cache, p=0.95, budget=150))
    assert (found.kept <= 150).all()
    assert (found.kept == 150).any()
    for layer in range(LAYERS):
        tokens, kept = candidates(cache, layer, 0, found.keep)
        lost = (tokens.tier >= 0) & ~kept
        for head in range(HEADS):
            weakest = tokens.votes[head][kept[head]].min()
            strongest = tokens.votes[head][lost[head]].max()
            assert weakest >= strongest
            tied, score = tokens.votes[head] == weakest, tokens.score[head]
            if bool((tied & lost[head]).any()):
                assert score[tied & kept[head]].min() >= score[tied & lost[head]].max() * 0.999


def test_a_rule_it_does_not_serve_is_refused() -> None:
    from siftkv.kernels import cuda

    cache = hard_cache(lengths=(100,))
    rule = rule_for(cache)
    for change in ({"metric": "rkv"}, {"union": False}, {"metric": "snapkv", "pool": 11}):
        with pytest.raises(FormatError, match="GPU selection"):
            cuda.select(cache.state, 0, dataclasses.replace(rule, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("metric", ["attention", "snapkv", "accumulated"])
def test_a_snapshot_is_selected_from_whatever_becomes_of_the_cache(metric: str) -> None:
    from siftkv.kernels import cuda

    torch.manual_seed(8)
    ours = hard_cache(("bf16", "k8v4"), group=2)
    theirs, rule = twin(ours), rule_for(ours, metric, 0.8)
    before = cuda.snapshot(ours.state, 2)
    for name in SELECTION_TENSORS:
        getattr(ours.state, name)[2].zero_()
    found = cuda.select(before, 0, rule, longest=700)
    expected = cuda.select(theirs.state, 2, rule, longest=700)
    for x, y in zip(vars(found).values(), vars(expected).values(), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(ours.state.pages, theirs.state.pages)
    assert bool(found.keep.any())
