"""SnapKV and what is built over it, against formulas written out for one head at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.policies import PromptView, parse_policy
from siftkv.policies.pyramidkv import PyramidKV

from tests.policies.views import LAYERS, N, H, G, R, attention, chosen, kept, top, view_of  # isort: skip


def plain_score(view: PromptView, prompt: int, head: int, window: int, kernel: int, pooling: str) -> Tensor:
    """SnapKV's vote `[n - window]`: each query head's summed attention, pooled by hand, mean over the group."""
    before, reach = view.length - window, kernel // 2
    heads = []
    for member in range(G):
        vote = attention(view, prompt, head, member)[-window:, :before].sum(0) / window
        around = [vote[max(0, i - reach) : i + reach + 1] for i in range(before)]
        heads.append(torch.stack([x.max() if pooling == "max" else x.sum() / kernel for x in around]))
    return torch.stack(heads).mean(0)


@pytest.mark.parametrize(
    ("kv", "window", "kernel", "pooling"),
    [
        ("snapkv:ratio=0.5", 32, 7, "max"),
        ("snapkv:ratio=0.5,window=16,kernel=5,pooling=avg", 16, 5, "avg"),
        ("snapkv:budget=30,window=10,kernel=1", 10, 1, "max"),
    ],
)
def test_snapkv_keeps_what_its_window_votes_for(kv: str, window: int, kernel: int, pooling: str) -> None:
    policy = parse_policy(kv)
    view = view_of(policy)
    tier = policy.classify(view)
    count = (30 if "budget" in kv else N // 2) - window
    for prompt in range(R):
        for head in range(H):
            score = plain_score(view, prompt, head, window, kernel, pooling)
            found = chosen(view, tier, prompt, head)
            assert len(found) == count
            # Tokens under one maximum tie, so the worth of the choice is compared and not the choice.
            torch.testing.assert_close(score[sorted(found)].sum(), score.topk(count).values.sum())


def test_sinks_count_towards_the_budget() -> None:
    policy = parse_policy("snapkv:budget=40,window=16,sinks=4")
    view = view_of(policy)
    assert kept(view, policy.classify(view)).sum(-1).tolist() == [[40] * H] * R


@pytest.mark.parametrize("length", [1, 5, 16, 17, 33])
def test_prompts_about_as_short_as_the_window_are_kept_within_it(length: int) -> None:
    for kv in ("snapkv:window=16,budget=20", "adakv:window=16,budget=20", "pyramidkv:window=16,budget=20"):
        policy = parse_policy(kv)
        view = view_of(policy, length)
        stays = kept(view, policy.classify(view))
        assert int(stays.sum(-1).min()) >= min(length, 16), kv
        if not kv.startswith("pyramidkv"):
            assert stays.sum((1, 2)).sub(H * min(length, 20)).abs().max() <= H / 2, kv


def test_a_prompt_in_company_is_cut_as_alone() -> None:
    for name in ("snapkv", "pyramidkv", "adakv", "rkv", "expected", "h2o:length=50,ratio=0.4", "tova:length=50"):
        policy = parse_policy(name)
        view = view_of(policy)
        assert view.q is not None and view.k is not None and view.v is not None  # noqa: PT018
        alone = PromptView(
            0, view.score[1:], view.protected, view.q[1:], view.k[1:], view.v[1:], None, view.rotary, LAYERS
        )
        assert torch.equal(policy.classify(view)[1:], policy.classify(alone)), name


def test_pyramid_is_the_arithmetic_of_its_authors() -> None:
    """b = capacity - window; least = b // beta; most = 2b - least, at most what there is; equal whole steps."""
    length, layers, window, beta = 1000, 12, 8, 20
    policy = PyramidKV(budget=208)
    mean = 208 - window
    least, most = mean // beta, 2 * mean - mean // beta
    step = (most - least) // (layers - 1)
    assert [policy.of_layer(length, layer, layers) for layer in range(layers)] == [
        most - layer * step for layer in range(layers)
    ]
    assert policy.of_layer(length, 0, layers) == 390
    assert policy.of_layer(length, layers - 1, layers) == 390 - 11 * 34


def test_pyramid_stays_within_the_prompt_and_its_budget() -> None:
    policy = PyramidKV(ratio=0.7)
    layers = [policy.of_layer(300, layer, 10) for layer in range(10)]
    assert layers[0] == 292, "the first layer keeps all there is"
    assert 202 <= sum(layers) / 10 < 202 + 10
    assert min(layers) > 0
    assert [PyramidKV(ratio=1.0).of_layer(300, layer, 10) for layer in range(10)] == [292] * 10
    assert PyramidKV(ratio=0.5).of_layer(300, 0, 1) == 142


def test_pyramid_classes_each_layer_by_its_own_count() -> None:
    policy = parse_policy("pyramidkv:budget=38,kernel=1")
    for layer in range(LAYERS):
        view = view_of(policy, layer=layer)
        tier = policy.classify(view)
        count = (59, 45, 31, 17, 3)[layer]
        for head in range(H):
            assert chosen(view, tier, 0, head) == top(plain_score(view, 0, head, 8, 1, "max"), count)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_adakv_shares_a_layer_budget_out(alpha: float) -> None:
    policy = parse_policy(f"adakv:budget=40,window=10,kernel=1,alpha={alpha}")
    view = view_of(policy)
    assert view.q is not None
    view.q[:, :, :G] *= 2.5  # a head whose attention is concentrated
    tier = policy.classify(view)
    mean, counts = 30, []
    for prompt in range(R):
        scores = [plain_score(view, prompt, head, 10, 1, "max") for head in range(H)]
        threshold = torch.cat(scores).topk(H * mean).values[-1]
        for head, score in enumerate(scores):
            won = int((score >= threshold).sum())
            count = round(won * (1 - alpha) + mean * alpha)
            assert chosen(view, tier, prompt, head) == top(score, count)
            counts.append(count)
        assert abs(sum(counts[-H:]) - H * mean) <= H / 2
    assert (len(set(counts)) == 1) == (alpha == 1.0), "heads differ unless the safeguard takes all"


@pytest.mark.parametrize(
    ("kv", "match"),
    [
        ("snapkv:ratio=0", "above 0"),
        ("snapkv:ratio=1.5", "at most 1"),
        ("snapkv:budget=-1", "budget"),
        ("snapkv:budget=20", "below window"),
        ("snapkv:kernel=4", "odd"),
        ("snapkv:kernel=0", "kernel"),
        ("snapkv:pooling=min", "max, avg"),
        ("snapkv:format=k2v4", "fewer than 4 bits"),
        ("pyramidkv:beta=0", "beta"),
        ("adakv:alpha=2", "alpha"),
    ],
)
def test_bad_settings(kv: str, match: str) -> None:
    with pytest.raises(PolicyError, match=match):
        parse_policy(kv)


def test_only_the_prompt_is_cut() -> None:
    for kv in ("snapkv", "pyramidkv", "adakv", "rkv", "expected"):
        rule = parse_policy(kv).decode_rule(3, 2)
        assert int(rule.cap.min()) == 2**31 - 1, kv
        assert not bool(rule.alpha.any()), kv
        assert rule.refresh == 0, kv
    assert [t.name for t in parse_policy("snapkv").tiers("fp16")] == ["fp16"]
    assert [t.name for t in parse_policy("snapkv:format=k4v4").tiers("fp16")] == ["k4v4"]
