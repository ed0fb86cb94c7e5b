"""Policies that hold a budget: StreamingLLM, H2O, TOVA; and the integer caches."""

from __future__ import annotations

import pytest
import torch

from siftkv.errors import PolicyError
from siftkv.policies import H2O, TOVA, Int4, Int8, Policy, StreamingLLM, parse_policy
from tests.policies.views import G, H, N, R, attention, chosen, kept, top, view_of


def test_streaming_is_sinks_and_window() -> None:
    policy = StreamingLLM(budget=30)
    assert (policy.sinks, policy.window) == (4, 26)
    view = view_of(policy)
    stays = kept(view, policy.classify(view))
    assert stays[0, 0].nonzero()[:, 0].tolist() == [*range(4), *range(N - 26, N)]
    assert int(policy.decode_rule(2, 2).cap.max()) == 0, "what leaves the window goes"
    assert StreamingLLM(ratio=0.5, length=100, sinks=2).window == 48
    assert StreamingLLM(budget=30, window=26) == policy


@pytest.mark.parametrize("budget", [40, 41])
def test_h2o_is_half_recent_half_accumulated(budget: int) -> None:
    policy = H2O(budget=budget)
    view = view_of(policy)
    tier = policy.classify(view)
    recent = budget - budget // 2
    for prompt in range(R):
        for head in range(H):
            matrix = torch.stack([attention(view, prompt, head, g) for g in range(G)]).amax(0)
            accumulated = matrix.tril(-1).sum(0)  # from later queries
            heavy = top(accumulated[: N - recent], budget // 2)
            stays = kept(view, tier)[prompt, head].nonzero()[:, 0].tolist()
            assert set(stays) == heavy | set(range(N - recent, N))


def test_h2o_sums_where_means_would_choose_others() -> None:
    policy = H2O(budget=40)
    view = view_of(policy)
    found = chosen(view, policy.classify(view), 0, 0)
    assert found != top(view.score[0, 0, : N - 20], 20)


def test_tova_asks_the_last_query_of_all_heads() -> None:
    policy = TOVA(budget=30)
    view = view_of(policy)
    tier = policy.classify(view)
    for prompt in range(R):
        rows = [attention(view, prompt, head, g)[-1] for head in range(H) for g in range(G)]
        expected = top(torch.stack(rows).mean(0)[: N - 1], 29)
        assert all(chosen(view, tier, prompt, head) == expected for head in range(H))


def test_decoding_holds_what_the_prompt_was_cut_to() -> None:
    for policy in (H2O(budget=40), TOVA(budget=40), H2O(budget=40, window=8), TOVA(budget=40, window=8, sinks=4)):
        [cap] = policy.decode_rule(1, 1).cap.unique().tolist()
        view = view_of(policy)
        tier = policy.classify(view)
        assert kept(view, tier).sum(-1).unique().tolist() == [40]
        assert cap + policy.window + policy.sinks == 40
        assert policy.decode_rule(1, 1).refresh == 1


def test_a_ratio_is_of_the_context_or_of_a_longer_prompt() -> None:
    policy = parse_policy("h2o:ratio=0.2,length=200")
    assert policy.window == 20
    assert policy.decode_rule(1, 1).cap.tolist() == [[[20]]]
    for length, held in ((100, 40), (200, 40), (400, 80)):
        view = view_of(policy, length, prompts=1)
        assert kept(view, policy.classify(view)).sum(-1).tolist() == [[held] * H]
    assert H2O().window == 205, "half of a fifth of 2048 tokens"


@pytest.mark.parametrize(
    ("kv", "match"),
    [
        ("streaming:budget=4", "no room"),
        ("streaming:budget=64,window=10", "leave one out"),
        ("streaming:ratio=2", "at most 1"),
        ("h2o:budget=16,window=20", "below window"),
        ("h2o:sample=0", "sample"),
        ("tova:interval=0", "interval"),
        ("tova:ratio=0.001,length=100", "budget of 0"),
        ("tova:length=0", "length"),
        ("tova:format=k1v1", "fewer than 4 bits"),
    ],
)
def test_bad_settings(kv: str, match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        parse_policy(kv)


@pytest.mark.parametrize(
    "settings", [{"ratio": "x"}, {"budget": "x"}, {"length": 1.5}, {"sinks": "a"}, {"window": 1.5}, {"budget": True}]
)
@pytest.mark.parametrize("policy", [H2O, TOVA, StreamingLLM])
def test_bad_values_of_an_object(policy: type[Policy], settings: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        policy(**settings)


def test_integer_caches_keep_everything_in_one_format() -> None:
    for policy, name in ((Int8(), "k8v8"), (Int4(), "k4v4")):
        [tier] = policy.tiers("bf16")
        assert tier.name == name
        assert not tier.scores
        assert int(policy.classify(view_of(policy)).abs().max()) == 0
        assert (policy.window, policy.sinks) == (1, 0)
    with pytest.raises(PolicyError, match="window"):
        parse_policy("int8:window=0")
