"""Votes, counts and caps: which tokens a layer keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siftkv.policies.hardkv.metrics import METRICS, Attention
from siftkv.policies.hardkv.rows import LayerTokens, attention_rows, top_p_count
from siftkv.policies.hardkv.selection import capped, coverage, filled, metric_counts, top_k, vote
from tests.hardkv.layers import layer

EVERY_METRIC = pytest.mark.parametrize("metric", METRICS)


def slow_votes(tokens: LayerTokens, p: float, metric: str) -> torch.Tensor:
    """Votes by plain loops: for every query and query head, the tokens one by one."""
    heads, count = tokens.position.shape
    votes = torch.zeros(heads, count, dtype=torch.int32)
    rows = attention_rows(tokens)
    logits = METRICS[metric](7).logits(rows, tokens)
    for h in range(heads):
        for r in range(rows.raw.shape[1]):
            seen = [t for t in range(count) if rows.visible[h, r, t]]
            raw = {t: float(rows.raw[h, r, t]) for t in seen}
            needed, total = 0, 0.0
            for value in sorted(raw.values(), reverse=True):
                needed, total = needed + 1, total + value
                if total >= p:
                    break
            best = sorted(seen, key=lambda t: (-float(logits[h, r, t]), -float(rows.logits[h, r, t]), t))
            for t in best[: needed if p < 1 else len(seen)]:
                votes[h, t] += int(tokens.candidate[h, t])
    return votes


@EVERY_METRIC
@pytest.mark.parametrize("p", [0.5, 0.9, 1.0])
def test_votes_equal_a_plain_count(metric: str, p: float) -> None:
    for seed, gaps in ((1, False), (2, True)):
        tokens = layer(seed, gaps=gaps, window=4, rows=8, sharp=2.0)
        assert torch.equal(vote(tokens, p, METRICS[metric](7)).votes, slow_votes(tokens, p, metric))


def test_queries_do_not_see_later_tokens() -> None:
    tokens = layer(3, rows=12, window=4)
    visible = attention_rows(tokens).visible.unflatten(1, (2, 12))  # [H, G, W, n]
    for w, position in enumerate(tokens.q_position.tolist()):
        assert visible[..., w, :].sum(-1).eq(position + 1).all()
    late = replace(tokens, k=tokens.k.clone())
    late.k[:, -3:] *= 9.0  # only the last three queries may notice
    first, second = (attention_rows(x).raw.unflatten(1, (2, 12))[:, :, :9] for x in (tokens, late))
    assert torch.equal(first, second)


@EVERY_METRIC
def test_the_order_of_memory_does_not_matter(metric: str) -> None:
    """Padding and other heads' lengths change nothing: the same tokens, more columns."""
    tokens = layer(4, gaps=True, sharp=2.0)
    found = vote(tokens, 0.8, METRICS[metric](7))
    pad = 13

    def wider(x: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat([x, torch.full((x.shape[0], pad, *x.shape[2:]), value).to(x)], 1)

    padded = replace(
        tokens,
        k=wider(tokens.k, 5.0),
        position=wider(tokens.position, -1),
        candidate=wider(tokens.candidate, 0),
        score=wider(tokens.score, 3.0),  # type: ignore[arg-type]
    )
    again = vote(padded, 0.8, METRICS[metric](7))
    assert torch.equal(again.votes[:, :-pad], found.votes)
    assert not again.votes[:, -pad:].any()
    torch.testing.assert_close(again.mass[:, :-pad], found.mass)


def test_permuting_tokens_permutes_votes() -> None:
    tokens = layer(5, sharp=2.0)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    mixed = replace(
        tokens,
        k=tokens.k[:, order],
        position=tokens.position[:, order],
        candidate=tokens.candidate[:, order],
        score=None,
    )
    found, again = vote(tokens, 0.9, Attention()), vote(mixed, 0.9, Attention())
    assert torch.equal(found.votes[:, order], again.votes)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.sampled_from([0.3, 1.0, 3.0]))
def test_a_larger_share_never_keeps_fewer(seed: int, a: float, b: float, sharp: float) -> None:
    tokens = layer(seed, sharp=sharp)
    low, high = (vote(tokens, p, Attention()) for p in sorted((a, b)))
    assert ((low.votes > 0) <= (high.votes > 0)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.floats(0.05, 0.999), st.sampled_from([0.2, 1.0, 4.0]))
def test_the_count_is_the_smallest_that_reaches_p(seed: int, p: float, sharp: float) -> None:
    rows = attention_rows(layer(seed, sharp=sharp))
    count = top_p_count(rows.raw, rows.visible, p)
    mass = rows.raw.double().sort(-1, descending=True).values.cumsum(-1)
    assert (mass.gather(-1, count[..., None] - 1) >= p - 1e-6).all()
    less = torch.where(count > 1, mass.gather(-1, (count[..., None] - 2).clamp_min(0))[..., 0], 0.0)
    assert (less < p + 1e-6).all()


def test_every_row_keeps_its_share_of_attention() -> None:
    tokens = layer(6, sharp=2.0)
    found = vote(tokens, 0.9, Attention())
    keep = (found.votes > 0) | ~tokens.candidate
    assert (attention_rows(tokens).raw * keep[:, None]).sum(-1).min() >= 0.9 - 1e-5
    assert (coverage(found.share, keep) >= 0.9 - 1e-5).all()


def test_a_concentrated_head_keeps_fewer_tokens_than_a_diffuse_one() -> None:
    tokens = layer(7, heads=2, count=200)
    tokens = replace(tokens, k=tokens.k * torch.tensor([4.0, 0.2])[:, None, None])
    kept = (vote(tokens, 0.9, Attention()).votes > 0).sum(-1)
    assert kept[0] < kept[1] // 2


def test_p_of_one_keeps_everything_whatever_rounding_says() -> None:
    tokens = layer(8, sharp=60.0)  # most probabilities are exactly 0
    assert bool((vote(tokens, 1.0, Attention()).votes > 0)[tokens.candidate].all())


def test_heads_taken_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = layer(9, heads=5, group=3)
    whole = vote(tokens, 0.9, METRICS["snapkv"](7), calibrated=True)
    monkeypatch.setattr("siftkv.policies.hardkv.selection._MOST_ELEMENTS", 1)
    parts = vote(tokens, 0.9, METRICS["snapkv"](7), calibrated=True)
    assert torch.equal(whole.votes, parts.votes)
    assert whole.calibration is not None
    assert parts.calibration is not None
    torch.testing.assert_close(whole.calibration.temperature, parts.calibration.temperature)


@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 16, 64), (3, 1, 80), (5, 7, 96), (2, 5, 128)])
def test_any_shape_of_heads(heads: int, group: int, dim: int) -> None:
    found = vote(layer(10, heads=heads, group=group, dim=dim), 0.9, METRICS["rkv"](7), union=group % 2 == 1)
    assert found.votes.shape == (heads, 60)
    torch.testing.assert_close(found.share.sum(-1), torch.ones(heads))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 30))
def test_a_cap_ranks_by_votes_then_mass_and_never_by_age(seed: int, most: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    votes = torch.randint(0, 4, (3, 24), generator=generator, dtype=torch.int32)
    mass = torch.rand(3, 24, generator=generator)
    keep = votes > 0
    left = capped(keep, votes, mass, most)
    assert (left <= keep).all()
    assert torch.equal(left.sum(-1), keep.sum(-1).clamp(max=most))
    for row in range(3):
        best = sorted(range(24), key=lambda t: (-int(votes[row, t]), -float(mass[row, t])))
        assert set(left[row].nonzero()[:, 0].tolist()) == set([t for t in best if keep[row, t]][:most])
    turned = capped(keep.flip(-1), votes.flip(-1), mass.flip(-1), most).flip(-1)
    assert torch.equal(turned, left)


def test_a_cap_may_be_one_a_head_and_filling_adds_the_best() -> None:
    votes = torch.tensor([[3, 0, 2, 1], [1, 1, 1, 1]], dtype=torch.int32)
    mass = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.4, 0.3, 0.2, 0.1]])
    left = capped(votes > 0, votes, mass, torch.tensor([1, 2]))
    assert left.tolist() == [[True, False, False, False], [True, True, False, False]]
    full = filled(torch.ones(2, 4, dtype=torch.bool), votes, mass, torch.tensor([4, 3]))
    assert full.sum(-1).tolist() == [4, 3]


@EVERY_METRIC
def test_top_k_keeps_the_same_number_in_every_head(metric: str) -> None:
    tokens = layer(14, sharp=2.0)
    found = top_k(tokens, 12, METRICS[metric](7))
    assert found.votes.sum(-1).tolist() == [12, 12]
    assert not (found.votes > 0)[~tokens.candidate].any()
    if metric == "attention":
        best = attention_rows(tokens).raw.mean(1).masked_fill(~tokens.candidate, -1).topk(12).indices
        assert found.votes.gather(1, best).all()


def test_max_over_the_group_lets_a_group_vote_once() -> None:
    tokens = layer(11, group=4, rows=6)
    found = vote(tokens, 0.9, Attention(), union=False)
    assert found.votes.max() <= 6
    assert vote(tokens, 0.9, Attention()).votes.max() > 6


def test_scores_stand_for_queries_that_are_not_there() -> None:
    tokens = replace(layer(12), q=torch.zeros(0, 4, 16), q_position=torch.zeros(0, dtype=torch.int64))
    found = vote(tokens, 0.5, METRICS["accumulated"](7))
    assert tokens.score is not None
    for h in range(2):
        order = tokens.score[h].argsort(descending=True)
        part = (tokens.score[h] / tokens.score[h].sum())[order].cumsum(0)
        best = order[: int((part < 0.5).sum()) + 1]
        expected = torch.zeros(60, dtype=torch.int32)
        expected[best] = 1
        assert torch.equal(found.votes[h], expected * tokens.candidate[h])


def test_the_uncalibrated_count_of_attention_is_its_own() -> None:
    own, oracle = metric_counts(layer(13), 0.9, Attention())
    assert torch.equal(own, oracle)
    pooled, _ = metric_counts(layer(13, sharp=3.0), 0.9, METRICS["snapkv"](7))
    assert not torch.equal(pooled, oracle)
