"""Settings of `hardkv`: what is refused, what a `kv` string says, and what becomes of a prompt."""

from __future__ import annotations

import pytest
import torch

from siftkv import HardKV
from siftkv.errors import FormatError, PolicyError
from siftkv.policies import PromptView, parse_policy
from siftkv.policies.base import UNLIMITED

BAD = {
    "p=0": "p=0",
    "p=1.01": "p=1.01",
    "p=-1": "p=-1",
    "p=nan": "p=nan",
    "metric=magic": "attention, snapkv, rkv, accumulated",
    "budget=60": "window \\+ sinks = 68",
    "budget=-3": "tokens a head",
    "budget=lots": "tokens a head",
    "budget=8MiB,layout=max": "beyond a budget in bytes",
    "lower=3000": "lower=3000 is above upper=2048",
    "window=0": "window=0",
    "interval=0": "interval=0",
    "queries=0": "needs the last queries",
    "pool=4": "odd",
    "condense=shred": "evict, merge",
    "calibrate=guess": "rank, temperature",
    "group=none": "union, max",
    "layout=wide": "true, max",
    "memory=perhaps": "true or false",
    "format=k2v4": "destroy",
    "select=topk": "budget in tokens",
    "nothing=1": "no setting",
}


@pytest.mark.parametrize("setting", BAD)
def test_bad_settings_are_refused(setting: str) -> None:
    with pytest.raises(PolicyError, match=BAD[setting]):
        parse_policy(f"hardkv:{setting}")


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(FormatError, match="k8x4"):
        parse_policy("hardkv:format=k8x4")


@pytest.mark.parametrize(
    "kv", ["hardkv", "hardkv:0.8,metric=rkv,memory=true", "hardkv:budget=512,window=32", "hardkv:budget=8MiB"]
)
def test_a_string_says_it_all(kv: str) -> None:
    policy = parse_policy(kv)
    assert isinstance(policy, HardKV)
    assert parse_policy(policy.describe()) == policy


def test_settings_from_python_and_from_text_are_equal() -> None:
    assert parse_policy("hardkv:budget=512,sparse_loading=true") == HardKV(budget=512, sparse_loading=True)
    with pytest.raises(PolicyError, match="true or false"):
        HardKV(memory=1)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="p=True"):
        HardKV(p=True)


def test_tiers_keep_what_the_cascade_needs() -> None:
    [dense] = HardKV().tiers("bf16")
    assert dense.votes
    assert dense.positions
    assert not dense.weights
    assert len(HardKV(format="bf16").tiers("bf16")) == 1
    merged = HardKV(format="k8v4", condense="merge").tiers("bf16")
    assert [t.name for t in merged] == ["bf16", "k8v4"]
    assert all(t.weights and t.votes for t in merged)


def test_decoding_goes_to_the_dense_tier_alone() -> None:
    rule = HardKV(format="k8v4").decode_rule(2, 3)
    assert rule.cap[0, 0].tolist() == [UNLIMITED, 0]
    assert not rule.alpha.any()
    assert rule.refresh == 0
    assert HardKV(metric="accumulated").decode_rule(2, 3).refresh == 8


def view(length: int, seed: int = 0, window: int = 8, sinks: int = 2) -> PromptView:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, length, heads, 16, generator=generator) for heads in (4, 2, 2))
    protected = torch.zeros(length, dtype=torch.bool)
    protected[:sinks] = protected[-window:] = True
    return PromptView(0, torch.rand(2, 2, length, generator=generator), protected, q * 2, k, v)


def small(**changes: object) -> HardKV:
    return HardKV(**({"window": 8, "sinks": 2, "lower": 32, "upper": 64, "queries": 8} | changes))  # type: ignore[arg-type]


def test_a_prompt_up_to_upper_is_dense() -> None:
    assert not small().classify(view(64)).any()


@pytest.mark.parametrize("metric", ["attention", "snapkv", "rkv", "accumulated"])
def test_a_longer_prompt_is_selected_by_its_last_queries(metric: str) -> None:
    prompt = view(120)
    tier = small(metric=metric, p=0.5).classify(prompt)
    dropped = (tier == -1) & ~prompt.protected
    assert 0 < int(dropped.sum()) < 2 * 2 * 110
    kept = (tier == 0) & ~prompt.protected
    assert torch.equal(tier == 0, ~(tier == -1))
    if metric == "attention":  # what two rows keep covers their share
        q = prompt.q[0, -1:].unflatten(1, (2, 2))  # type: ignore[index]
        attention = torch.einsum("whgd,nhd->hgwn", q, prompt.k[0]).mul(0.25).softmax(-1)  # type: ignore[index]
        held = (attention * (kept[0] | prompt.protected)[:, None, None]).sum(-1)
        assert (held >= 0.5).all()


def test_a_prompt_in_a_batch_is_selected_as_alone() -> None:
    both = view(100)
    alone = PromptView(0, both.score[1:], both.protected, both.q[1:], both.k[1:], both.v[1:])  # type: ignore[index]
    assert torch.equal(small(p=0.6).classify(both)[1:], small(p=0.6).classify(alone))


def test_selected_prompt_tokens_take_the_format_and_the_budget() -> None:
    prompt = view(200)
    tier = small(format="k8v4", budget=40).classify(prompt)
    assert ((tier == 1) & ~prompt.protected).sum(-1).max() == 30
    assert not (tier == 0).any()


def test_the_format_of_the_model_by_its_own_name_is_dense() -> None:
    prompt = view(200)  # float32
    assert torch.equal(small(format="fp32", p=0.5).classify(prompt), small(p=0.5).classify(prompt))


def test_merging_waits_for_all_layers() -> None:
    assert not small(condense="merge").classify(view(120)).any()
    assert not small(layout="max").classify(view(120)).any()
