"""Errors that nobody foresaw, in the middle of a pass: who ends, and who does not."""

from __future__ import annotations

import pytest

from siftkv import SamplingParams
from siftkv.errors import FormatError, PolicyError, PromptFailed
from siftkv.policies import parse_policy
from siftkv.policies.base import Prices, PromptView, Sifted
from siftkv.policies.diffkv import DiffKV
from tests.tiny import prompt, tiny_llm

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KV = "diffkv:window=8,sinks=2,alpha_high=1.2,alpha_low=0.6,interval=2"
POISON = 31


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """DiffKV raises at prompts of `POISON` tokens, in the second layer's pass at the earliest."""
    real, seen = DiffKV.sift, {"poison": 0}

    def sift(self: DiffKV, view: PromptView, prices: Prices) -> Sifted:
        seen["poison"] += view.length == POISON
        if view.length == POISON and seen["poison"] > 1:
            raise ZeroDivisionError("a fault of the policy's own")
        return real(self, view, prices)

    monkeypatch.setattr(DiffKV, "sift", sift)
    return ZeroDivisionError


@pytest.mark.usefixtures("faulty")
def test_a_policy_that_raises_ends_its_own_request_only() -> None:
    llm = tiny_llm(KV, check_integrity=True)
    good = llm.generate([prompt(n, n) for n in (20, 40)], GREEDY)
    with pytest.raises(PromptFailed, match="could not be processed: ZeroDivisionError") as caught:
        llm.generate([prompt(20, 20), prompt(POISON, 1), prompt(40, 40)], GREEDY)
    outputs = caught.value.outputs  # type: ignore[attr-defined]
    assert [outputs[i].token_ids for i in (0, 2)] == [o.token_ids for o in good]
    assert outputs[1].finish_reason == "abort"
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert [o.token_ids for o in llm.generate([prompt(20, 20)], GREEDY)] == [good[0].token_ids]


@pytest.mark.usefixtures("faulty")
def test_it_ends_while_others_go_on_running() -> None:
    llm = tiny_llm(KV, check_integrity=True)
    engine, policy = llm.engine, parse_policy(KV)
    running = engine.add(prompt(20, 20), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), policy)
    engine.step()
    bad = engine.add(prompt(POISON, 1), GREEDY, policy)
    for _ in range(4):
        engine.step()
    [ended], [going] = engine.sequences(bad), engine.sequences(running)
    assert ended.finish_reason == "abort"
    assert isinstance(ended.error, PromptFailed)
    assert going.finish_reason is None
    assert len(going.output_ids) >= 3


@pytest.mark.parametrize("kv", ["sift:top=k8v8,high=k8v4c,low=k4v8", "sift:top=bf16,high=k8v4c,low=k4v8"])
def test_tiers_of_sift_that_cost_the_same_are_refused_when_a_cache_is_opened(kv: str) -> None:
    with pytest.raises(PolicyError, match="use a smaller format"):
        tiny_llm(kv)


def test_layers_are_not_measured_for_a_policy_that_the_pool_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("layers were measured")

    monkeypatch.setattr("siftkv.engine.engine.layer_costs", measured)
    with pytest.raises(FormatError):
        tiny_llm(KV).engine.add(prompt(20, 20), GREEDY, parse_policy("sift"))


@pytest.mark.parametrize(
    "kv",
    [
        "sift:horizon=2147483648",
        "sift:contrast=inf",
        "sift:pool=99999999999",
        f"sift:reach={10**22}",
        f"sift:young={10**22}",
        f"diffkv:sample={10**22}",
        f"fixed:length={10**22}",
        "snapkv:kernel=100001",
        "sift:ratio=1e-320",
        "hardkv:budget=²",
        "hardkv:budget=4294967364",
        f"hardkv:budget={'9' * 400}GiB",
        "hardkv:pool=100001",
    ],
)
def test_settings_beyond_what_a_cache_counts_to_are_refused(kv: str) -> None:
    with pytest.raises(PolicyError, match=r"use (a|tokens)"):
        parse_policy(kv)
