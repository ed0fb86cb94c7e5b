"""The cascade inside the engine: when it triggers, what it keeps, and the same answers in any company."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from siftkv.engine.cascade import Cascade, cascade_of
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.policies import HardKV, parse_policy
from tests.hardkv.requests import FULL, KERNELS, KV, cascade, greedy, llm_of, run, with_setting
from tests.tiny import prompt, small_cache


@KERNELS
@pytest.mark.parametrize("setting", ["metric=attention", "metric=rkv,memory=true", "condense=merge", "layout=max"])
def test_with_p_of_one_and_no_cap_it_is_the_full_engine(setting: str, kernels: str) -> None:
    kv = f"hardkv:p=1,{setting},window=8,sinks=2,lower=16,upper=32,interval=8,queries=4"
    llm = llm_of(kv, formats=["bf16"], kernels=kernels)
    rows = [ForcedRow(prompt(50, i), prompt(40, i + 7), parse_policy(k)) for i, k in ((1, kv), (1, FULL))]
    rows[1] = ForcedRow(rows[0].prompt_ids, rows[0].forced_ids, rows[1].policy)
    forced = ForcedRun(llm.engine, rows)
    for logits in forced:
        torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=2e-5)
    assert forced.cascades[0] is not None
    assert len(forced.cascades[0].history) > 4
    ours, full = run(llm, [prompt(50, 1)] * 2, 40, [kv, FULL])
    assert ours.token_ids == full.token_ids


def test_triggers_stand_an_interval_apart_and_start_with_the_prompt() -> None:
    llm = llm_of()
    run(llm, [prompt(50)], 60, [KV])
    at = [t.position for t in cascade(llm).history]
    assert at[0] == 50
    assert [b - a for a, b in pairwise(at[1:])] == [8] * (len(at) - 2)
    assert 50 < at[1] <= 58
    assert not cascade(llm).history[0].rewritten  # the prompt was selected when it was stored
    assert all(t.rewritten for t in cascade(llm).history[1:])


def test_triggers_of_different_prompts_are_spread() -> None:
    llm = llm_of("hardkv:window=8,interval=64,lower=16,upper=32")
    bound, spec = llm.engine.bind(llm.kv), llm.cache.spec
    policy = llm.kv
    assert isinstance(policy, HardKV)
    offsets = {Cascade(bound, policy, spec, prompt(30, i), 0)._stagger for i in range(200)}
    assert len(offsets) > 50
    offsets = {Cascade(bound, policy, spec, prompt(30, 0), i)._stagger for i in range(200)}
    assert len(offsets) > 50


def test_between_lower_and_upper_only_votes_are_counted() -> None:
    llm = llm_of("hardkv:p=0.4,window=8,sinks=2,lower=16,upper=500,interval=8,queries=4", formats=["bf16"])
    ours, full = run(llm, [prompt(40, 3)] * 2, 60, [llm.kv.describe(), FULL])
    assert ours.token_ids == full.token_ids
    assert len(cascade(llm).history) > 5
    assert not any(t.rewritten for t in cascade(llm).history)
    llm.engine.add(prompt(40, 3), greedy(60), llm.kv, request_id="again")
    for _ in range(50):
        llm.engine.step()
    tokens = llm.cache.tokens(1, llm.engine.scheduler.running[0].slot)
    assert tokens.votes.max() > 4  # more than one trigger's queries and heads could give a token... of 4 rows a head
    assert not tokens.votes[tokens.tier == -2].any()


@KERNELS
def test_heads_keep_their_own_numbers_and_pages_return(kernels: str) -> None:
    llm = llm_of(formats=["bf16"], kernels=kernels)
    ours, full = run(llm, [prompt(100, 2)] * 2, 60, [KV, FULL])
    assert ours.kv is not None
    assert full.kv is not None
    assert ours.kv.pages < full.kv.pages
    last = cascade(llm).history[-1]
    assert len(set(last.kept.flatten().tolist())) > 1
    assert 0 < last.utilisation < 1
    assert (last.coverage > 0.4).all()
    assert (last.coverage <= 1.0 + 1e-5).all()


def test_a_larger_share_keeps_more() -> None:
    kept = []
    for p in (0.2, 0.5, 0.8, 1.0):
        llm = llm_of(KV.replace("p=0.4", f"p={p}"))
        forced = ForcedRun(llm.engine, [ForcedRow(prompt(100, 4), prompt(30, 5), llm.kv)])
        list(forced)
        assert forced.cascades[0] is not None
        kept.append(float(forced.cascades[0].history[-1].kept.sum()))
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


VARIANTS = [
    "metric=snapkv",
    "metric=rkv",
    "metric=accumulated",
    "metric=accumulated,queries=0",
    "calibrate=temperature,metric=snapkv",
    "group=max",
    "memory=true",
    "sparse_loading=true,upper=70",
    "layout=max",
    "condense=merge",
    "format=k8v4",
    "format=k8v4,condense=merge,budget=20",
    "budget=24",
    "budget=24,select=topk",
    "budget=200KiB",
]


@pytest.mark.parametrize(
    ("setting", "kernels"),
    [*((x, "reference") for x in VARIANTS), *((x, "numba") for x in ("p=0.4", VARIANTS[7], VARIANTS[11]))],
)
def test_every_variant_runs_beside_others_that_do_not_notice(setting: str, kernels: str) -> None:
    kv = with_setting(setting)
    diffkv = "diffkv:alpha_high=1.5,alpha_low=0.9,window=8,sinks=2"
    llm = llm_of(kv, formats=["bf16", "k8v4", "k4v2"], kernels=kernels)
    prompts = [prompt(90, 1), prompt(45, 2), prompt(20, 3)]
    policies = [kv, FULL, diffkv]
    together = run(llm, prompts, 30, policies)
    history = [t.to_dict() for t in cascade(llm).history]
    for request in ("r0", "r1", "r2"):
        llm.engine.forget(request)
    for i, (p, k) in enumerate(zip(prompts, policies, strict=True)):
        [alone] = run(llm, [p], 30, [k])
        assert alone.token_ids == together[i].token_ids
        assert alone.kv is not None
        assert together[i].kv is not None
        assert alone.kv.tokens_by_tier == together[i].kv.tokens_by_tier  # type: ignore[union-attr]
        if i == 0:
            assert [t.to_dict()["kept"] for t in cascade(llm).history] == [t["kept"] for t in history]
            assert all(t.selected.equal(t.kept) for t in cascade(llm).history if t.rewritten)
        llm.engine.forget("r0")


def test_a_budget_binds_a_head_and_a_request() -> None:
    llm = llm_of(with_setting("budget=24,p=0.95"))
    run(llm, [prompt(100)], 40, [llm.kv.describe()])
    assert max(int(t.kept.max()) for t in cascade(llm).history) == 24
    llm = llm_of(with_setting("budget=64KiB,p=0.95"))
    run(llm, [prompt(300)], 40, [llm.kv.describe()])
    tier = llm.cache.spec.layouts[0]
    for trigger in cascade(llm).history:
        pages = sum(-(-(int(n) - 10) // tier.tokens) for n in trigger.kept.flatten())
        assert pages * llm.cache.spec.page_bytes <= 64 << 10
    assert len(set(cascade(llm).history[-1].kept.flatten().tolist())) > 1


def test_padding_makes_all_heads_as_long_as_the_longest() -> None:
    llm = llm_of(with_setting("layout=max"))
    run(llm, [prompt(100)], 40, [llm.kv.describe()])
    for trigger in cascade(llm).history:
        assert trigger.selected.min() == trigger.selected.max()
        assert trigger.utilisation == 1.0


def test_rewritten_tokens_take_the_format() -> None:
    llm = llm_of(with_setting("format=k8v4"))
    [out] = run(llm, [prompt(100)], 41, [llm.kv.describe()])
    assert out.kv is not None
    assert out.kv.tokens_by_tier["k8v4"] > out.kv.tokens_by_tier["fp32"] > 0


def test_temperatures_are_reported_and_die_with_the_request() -> None:
    llm = llm_of(with_setting("calibrate=temperature,metric=snapkv"))
    run(llm, [prompt(100)], 60, [llm.kv.describe()])
    calibration = cascade(llm).history[-1].calibration
    assert calibration is not None
    assert calibration.temperature.shape == (2, 2)
    assert (calibration.temperature > 0).all()
    before = [t.to_dict() for t in cascade(llm).history]
    llm.engine.forget("r0")
    run(llm, [prompt(100)], 60, [llm.kv.describe()])
    assert [t.to_dict() for t in cascade(llm).history] == before


def test_sparse_loading_skips_pages_without_votes() -> None:
    kv = with_setting("sparse_loading=true,upper=500,p=0.05,lower=16")
    llm = llm_of(kv, formats=["bf16"])
    forced = ForcedRun(
        llm.engine,
        [ForcedRow(prompt(300, 1), prompt(20, 2), parse_policy(k)) for k in (kv, FULL)],
    )
    different, skipped = 0.0, 0
    for logits in forced:
        different = max(different, float((logits[0] - logits[1]).abs().max()))
        skipped = max(skipped, int(llm.cache.state.page_skip.sum()))
    assert skipped > 0
    assert different > 1e-3
    assert forced.reports[0].tokens_by_tier["dropped"] == 0


def test_above_upper_every_page_is_read_again() -> None:
    llm = llm_of(with_setting("sparse_loading=true,p=1,upper=60"), formats=["bf16"])
    llm.engine.add(prompt(60, 1), greedy(20), llm.kv, request_id="r0")
    for _ in range(2):
        llm.engine.step()
    state = llm.cache.state
    state.page_skip.copy_(state.page_table >= 0)  # as if nothing had had votes so far
    while len(cascade(llm).history) < 2:
        llm.engine.step()
    assert cascade(llm).history[-1].rewritten
    assert not state.page_skip.any()
    llm.engine.abort("r0")


def test_a_prompt_above_upper_skips_no_page() -> None:
    llm = llm_of(with_setting("sparse_loading=true,p=0.3"), formats=["bf16"])
    llm.engine.add(prompt(300, 1), greedy(20), llm.kv, request_id="r0")
    for _ in range(12):
        llm.engine.step()
        assert not llm.cache.state.page_skip.any()
    llm.engine.abort("r0")


@pytest.mark.parametrize("condense", ["evict", "merge"])
def test_a_budget_in_bytes_holds_however_tokens_fall_on_heads(condense: str) -> None:
    kv = f"hardkv:window=8,lower=16,upper=32,budget=120KiB,condense={condense}"
    cache, [bound] = small_cache([kv], layers=12, heads=4, page_bytes=1024)
    heads, [layout] = cache.spec.head_slots, cache.spec.layouts
    found = cascade_of(bound, cache.spec, [1])
    assert found is not None
    most = found._most_tokens
    assert 0 < most < 120 * layout.tokens
    for lone in range(heads if condense == "merge" else 1):  # heads without votes, which then keep one token
        full_pages = (most - (heads - lone)) // layout.tokens
        assert full_pages + heads <= (120 << 10) // cache.spec.page_bytes
