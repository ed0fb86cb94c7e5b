"""Policies: the kv string, settings, prompt classes."""

from __future__ import annotations

import pytest
import torch

from siftkv.errors import FormatError, PolicyError
from siftkv.policies import POLICIES, DiffKV, Full, PromptView, Uniform, parse_policy
from siftkv.policies.base import DROPPED


def view(score: torch.Tensor, layer: int = 0) -> PromptView:
    n = score.shape[1]
    return PromptView(layer, score[None], torch.zeros(n, dtype=torch.bool))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_meets_the_contract(name: str) -> None:
    policy = parse_policy(name)
    assert parse_policy(policy.describe()) == policy, "a policy's string makes it again"
    tiers = policy.tiers("bf16")
    assert tiers
    score = torch.rand(3, 50) / 50
    tier = policy.classify(view(score))[0]
    assert tier.shape == (3, 50)
    assert tier.dtype == torch.int8
    assert int(tier.min()) >= DROPPED
    assert int(tier.max()) < len(tiers)
    rule = policy.decode_rule(4, 3)
    assert rule.alpha.shape == rule.cap.shape == (4, 3, len(tiers))
    rows = policy.rows(50)
    if rows is not None:
        assert all(t.scores and t.positions for t in tiers), "scores are kept where they are read"
        assert bool((rows[0].diff() > 0).all())
        assert len(rows[0]) == len(rows[1])
    assert type(policy).__doc__


def test_strings() -> None:
    assert parse_policy("full") == Full()
    assert parse_policy("uniform:k4v4") == Uniform("k4v4")
    assert parse_policy(" diffkv : alpha_low=0.1 , window=32,high=k8v8 ") == DiffKV(
        alpha_low=0.1, window=32, high="k8v8"
    )
    assert parse_policy("diffkv:2") == DiffKV(alpha_high=2.0)
    assert parse_policy(DiffKV()) == DiffKV()


@pytest.mark.parametrize(
    ("kv", "match"),
    [
        ("", "full, uniform, diffkv, hardkv, sift, fixed"),
        ("h2o2", "full, uniform, diffkv"),
        ("diffkv:foo=1", "alpha_high"),
        ("diffkv:window=1.5", "whole number"),
        ("diffkv:alpha_low=x", "number"),
        ("diffkv:window=8,window=9", "twice"),
        ("diffkv:alpha_low=0.5,alpha_high=0.1", "above"),
        ("diffkv:alpha_high=nan", "finite"),
        ("diffkv:alpha_low=-1", "0 or more"),
        ("diffkv:window=0", "window"),
        ("diffkv:sinks=-1", "sinks"),
        ("diffkv:importance=luck", "importance"),
        ("diffkv:sample=0", "sample"),
        ("diffkv:interval=0", "interval"),
        ("diffkv:catch_up=2", "catch_up"),
        ("diffkv:high=k4v2,low=k4v2", "uniform:k4v2"),
        ("diffkv:high=k4v2,low=k8v4", "swap"),
        ("diffkv:high=k4v4,low=k2v4", "fewer than 4 bits"),
    ],
)
def test_bad_strings(kv: str, match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        parse_policy(kv)


@pytest.mark.parametrize(
    "settings",
    [
        {"window": "64"},
        {"window": 1.5},
        {"window": True},
        {"interval": 1.5},
        {"alpha_high": "1"},
        {"alpha_high": [[1.0], [1.0, 2.0]]},
        {"high": 1},
    ],
)
def test_bad_values_of_an_object(settings: dict[str, object]) -> None:
    with pytest.raises(PolicyError):
        DiffKV(**settings)  # type: ignore[arg-type]


def test_every_token_is_measured_before_it_leaves_the_window() -> None:
    assert parse_policy("diffkv:window=4").decode_rule(2, 2).refresh == 4
    assert parse_policy("fixed:window=1").decode_rule(2, 2).refresh == 1
    assert parse_policy("diffkv").decode_rule(2, 2).refresh == 8


def test_one_row_of_thresholds_stands_for_every_layer() -> None:
    policy = DiffKV(alpha_high=[[1.0, 2.0]], alpha_low=[0.5])
    assert policy.decode_rule(3, 2).alpha[2].tolist() == [[1.0, 0.5], [2.0, 0.5]]
    assert policy.classify(view(torch.full((2, 1), 1.5), layer=2))[0].tolist() == [[0], [1]]


def test_bad_format_and_type() -> None:
    with pytest.raises(FormatError, match="k9v9"):
        parse_policy("uniform:k9v9")
    with pytest.raises(PolicyError, match="string"):
        parse_policy(3)  # type: ignore[arg-type]


def test_fixed_shares_by_rank() -> None:
    score = torch.rand(2, 200)
    protected = torch.zeros(200, dtype=torch.bool)
    protected[-64:] = True
    policy = parse_policy("fixed:high_share=0.1,low_share=0.3")
    tier = policy.classify(PromptView(0, score[None], protected))[0]
    for head in range(2):
        order = score[head, :-64].argsort(descending=True)
        assert set(tier[head, order[:20]].tolist()) == {0}
        assert set(tier[head, order[20:80]].tolist()) == {1}
        assert set(tier[head, order[80:]].tolist()) == {DROPPED}
    with pytest.raises(PolicyError, match="add up"):
        parse_policy("fixed:high_share=0.6,low_share=0.6")


def test_prompt_classes_are_against_alpha_over_position() -> None:
    """Token i is high at alpha_high / (i + 1), low at alpha_low / (i + 1); equality keeps (DiffKV, section 4.2)."""
    position = torch.arange(6) + 1.0
    score = torch.stack([0.5 / position, 0.1 / position, 0.0999 / position])
    tier = DiffKV(alpha_high=0.5, alpha_low=0.1).classify(view(score))[0]
    assert tier.tolist() == [[0] * 6, [1] * 6, [DROPPED] * 6]


def test_thresholds_by_layer_and_head() -> None:
    policy = DiffKV(alpha_high=[[0.0, 1.0], [1.0, 0.5]], alpha_low=[0.0, 0.5])
    score = torch.full((2, 1), 0.6)
    assert policy.classify(view(score, 0))[0].tolist() == [[0], [1]]
    assert policy.classify(view(score, 1))[0].tolist() == [[1], [0]]
    assert policy.decode_rule(2, 2).alpha.tolist() == [[[0.0, 0.0], [1.0, 0.0]], [[1.0, 0.5], [0.5, 0.5]]]


def test_zero_alpha_low_keeps_everything() -> None:
    tier = DiffKV(alpha_high=1.0, alpha_low=0.0).classify(view(torch.zeros(2, 30)))[0]
    assert int(tier.min()) == 1
