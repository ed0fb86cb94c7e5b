"""Expected Attention against its formula, with rotations as matrices and statistics by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.policies import PromptView, parse_policy
from siftkv.policies.expected_attention import unrotated
from tests.policies.views import D, G, H, N, R, chosen, rotary, top, view_of


def rotation(position: int) -> Tensor:
    """`[D, D]` of one position, half-split."""
    cos, sin = (x[position] for x in rotary())
    matrix = torch.zeros(D, D)
    for i in range(D // 2):
        matrix[i, i], matrix[i, i + D // 2] = cos[i], -sin[i]
        matrix[i + D // 2, i], matrix[i + D // 2, i + D // 2] = sin[i], cos[i]
    return matrix


def plain_score(view: PromptView, prompt: int, head: int, future: int, covariance: bool, norm: bool) -> Tensor:
    """fp32 `[n - 4]`: softmax of k.mu / sqrt(D) + k' S k / 2D over the tokens after the sinks, mean over the group."""
    assert view.q is not None
    assert view.k is not None
    assert view.v is not None
    turn = torch.stack([rotation(p) for p in range(N, N + future)]).mean(0)
    keys, total = view.k[prompt, 4:, head], torch.zeros(N - 4)
    for member in range(G):
        plain = torch.stack([rotation(p).T @ view.q[prompt, p, head * G + member] for p in range(4, N)])
        mean, spread = turn @ plain.mean(0), turn @ torch.cov(plain.T, correction=0) @ turn.T
        logits = keys @ mean / math.sqrt(D)
        if covariance:
            logits = logits + torch.stack([key @ spread @ key for key in keys]) / D / 2
        total += logits.softmax(-1) / G
    return total * view.v[prompt, 4:, head].norm(dim=-1) if norm else total


@pytest.mark.parametrize(("covariance", "norm"), [(True, True), (False, True), (True, False)])
def test_it_keeps_what_future_queries_should_look_at(covariance: bool, norm: bool) -> None:
    policy = parse_policy(f"expected:budget=35,future=64,covariance={covariance},value_norm={norm}")
    view = view_of(policy)
    tier = policy.classify(view)
    for prompt in range(R):
        for head in range(H):
            score = plain_score(view, prompt, head, 64, covariance, norm)[:-1]  # the last token is the window
            assert chosen(view, tier, prompt, head) == {i + 4 for i in top(score, 35 - 5)}


def test_epsilon_lets_value_norms_speak() -> None:
    policy = parse_policy("expected:budget=20,epsilon=1000000")
    view = view_of(policy)
    assert view.v is not None
    norm = view.v[0, 4:-1, 1].norm(dim=-1)
    assert chosen(view, policy.classify(view), 0, 1) == {i + 4 for i in top(norm, 15)}


def test_rotation_is_undone_whatever_factor_it_carries() -> None:
    cos, sin = rotary()
    plain = torch.randn(1, 50, 3, D)
    low, high = plain.chunk(2, -1)
    c, s = cos[:50, None] * 1.3, sin[:50, None] * 1.3
    turned = torch.cat([low * c - high * s, high * c + low * s], -1)
    torch.testing.assert_close(unrotated(turned, cos * 1.3, sin * 1.3), plain)


def test_at_the_end_of_the_context_and_in_short_prompts() -> None:
    policy = parse_policy("expected:ratio=0.5")
    for length in (1, 3, 4, 5, 6, 400):
        tier = policy.classify(view_of(policy, length, prompts=1))
        assert tier.shape == (1, H, length)
        if length == 400:
            assert ((tier >= 0).sum(-1) == 200 - 5).all()


def test_bad_settings() -> None:
    for kv, match in (("expected:future=0", "future"), ("expected:epsilon=-1", "epsilon")):
        with pytest.raises(PolicyError, match=match):
            parse_policy(kv)
