"""8-bit keys in some heads."""

from __future__ import annotations

import pytest
import torch

from siftkv import SamplingParams
from siftkv.errors import PolicyError
from siftkv.formats import TierFormat
from siftkv.policies import Policy, parse_policy
from siftkv.policies.base import Prices, PromptView
from siftkv.policies.precise_keys import PreciseKeys, with_precise_keys
from tests.tiny import prompt, random_prompt, random_step, small_cache, tiny_llm

DIFFKV = "diffkv:alpha_high=0.9,alpha_low=0.4,window=8,sinks=2"
SMALL = {"kv_cache_memory_bytes": 1 << 24}
GREEDY = SamplingParams(temperature=0, max_tokens=30)


def test_names_of_formats() -> None:
    assert [with_precise_keys(TierFormat.parse(x)).name for x in ("k4v2", "k4v2c", "k8v4", "bf16", "k2v4_g24")] == [
        "k8v2",
        "k8v2c",
        "k8v4",
        "bf16",
        "k8v4_g24",
    ]


def test_only_those_heads_get_them() -> None:
    policy = PreciseKeys(parse_policy(DIFFKV), ((1, 0),))
    assert [t.name for t in policy.tiers("fp32")] == ["k8v4", "k8v2", "k4v2"]
    cache, [bound] = small_cache([policy], heads=2)
    slot = cache.admit(bound.rule)
    generator = torch.Generator().manual_seed(0)
    random_prompt(cache, bound, slot, 90, generator)
    for _ in range(60):
        random_step(cache, [slot], generator)
        cache.check_integrity()
    k8v4, k8v2, k4v2 = cache.state.lengths[slot].unbind(-1)
    assert bool((k8v4 > 0).all())
    assert (k8v2 > 0).tolist() == [[False, False], [True, False]]
    assert (k4v2 > 0).tolist() == [[True, True], [False, True]]


def test_heads_hold_what_the_base_would() -> None:
    """Tokens of a random cache go by score alone, so a format changes no counts."""
    found = []
    for policy in (parse_policy(DIFFKV), PreciseKeys(parse_policy(DIFFKV), ((0, 1), (1, 1)))):
        cache, [bound] = small_cache([policy], heads=2)
        slot = cache.admit(bound.rule)
        random_prompt(cache, bound, slot, 90, torch.Generator().manual_seed(0))
        found.append(cache.state.lengths[slot].long().sum(-1))
    assert torch.equal(*found)


def test_all_heads_are_the_more_precise_format() -> None:
    everywhere = PreciseKeys(
        parse_policy("uniform:k4v4,window=8,sinks=2"), tuple((i, j) for i in (0, 1) for j in (0, 1))
    )
    asked = tiny_llm("uniform:k8v4,window=8,sinks=2", **SMALL).generate([prompt(60)], GREEDY)[0]
    found = tiny_llm(everywhere, **SMALL).generate([prompt(60)], GREEDY)[0]
    assert found.outputs[0].token_ids == asked.outputs[0].token_ids
    assert found.kv.tokens_by_tier["k4v4"] == 0


class _Shares(Policy):
    """What `sift` hands on: a price seen, a share a tier."""

    name = "shares"
    window, sinks = 4, 0

    def tiers(self, dense: str) -> tuple[object, ...]:  # type: ignore[override]
        return parse_policy(DIFFKV).tiers(dense)

    def classify(self, prompt: PromptView) -> torch.Tensor:
        return torch.zeros(prompt.score.shape, dtype=torch.int8)

    def sift(self, prompt: PromptView, prices: Prices) -> object:  # type: ignore[override]
        from siftkv.policies.base import Sifted

        self.seen = prices.token
        return Sifted(self.classify(prompt) - 1, None, torch.tensor([0.25, 0.5]).expand(*prompt.score.shape[:2], 2))

    def decode_rule(self, num_layers: int, num_kv_heads: int):  # type: ignore[no-untyped-def]
        return parse_policy(DIFFKV).decode_rule(num_layers, num_kv_heads)


def test_budgets_of_bytes_count_them() -> None:
    base = _Shares()
    policy = PreciseKeys(base, ((0, 1),))
    view = PromptView(0, torch.zeros(1, 2, 5), torch.zeros(5, dtype=torch.bool))
    found = policy.sift(view, Prices((12.0, 10.0, 8.0), 1.0, 1.0, 64.0))
    assert base.seen == (12.0, 9.0)  # mean of a head at 8 and one at 10
    assert found.share is not None
    assert found.share[0].tolist() == [[0.25, 0.0, 0.5], [0.25, 0.5, 0.0]]
    assert bool((found.tier == -1).all())


def test_mistakes() -> None:
    with pytest.raises(PolicyError, match="hardkv cannot mix formats by head"):
        PreciseKeys(parse_policy("hardkv"), ((0, 0),))
    with pytest.raises(PolicyError, match="names heads that a model of 2 x 2 does not have"):
        tiny_llm(PreciseKeys(parse_policy(DIFFKV), ((2, 0),)))
