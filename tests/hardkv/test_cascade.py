"""The cascade inside the engine: same answers in any company, nothing lost at the edges."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from siftkv import LLM, RequestOutput, SamplingParams
from siftkv.engine.cascade import Cascade, cascade_of
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.engine.triggers import Trigger
from siftkv.errors import OutOfPages, PolicyError
from siftkv.policies import HardKV, parse_policy
from tests.tiny import prompt, small_cache, tiny_llm

KV = "hardkv:p=0.4,window=8,sinks=2,lower=16,upper=32,interval=8,queries=4"
FULL = "full:window=8"
KERNELS = pytest.mark.parametrize("kernels", ["reference", "numba"])


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def llm_of(kv: str = KV, **settings: Any) -> LLM:
    """A small pool: checking its integrity in every step takes as long as it has pages."""
    return tiny_llm(kv, **({"kv_cache_memory_bytes": 6 << 20} | settings))


def run(llm: LLM, prompts: list[list[int]], tokens: int, kv: list[str]) -> list[RequestOutput]:
    """All at once, each under its own policy; the cache is empty after it."""
    ids = [
        llm.engine.add(p, greedy(tokens), parse_policy(k), request_id=f"r{i}")
        for i, (p, k) in enumerate(zip(prompts, kv, strict=True))
    ]
    done: dict[str, Any] = {}
    while llm.engine.has_work:
        for chunk in llm.engine.step():
            if chunk.output is not None:
                done[chunk.request_id] = chunk.output
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    return [done[i] for i in ids]


def cascade(llm: LLM, request: str = "r0") -> Cascade:
    [sequence] = llm.engine.sequences(request)
    assert sequence.cascade is not None
    return sequence.cascade


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


def with_setting(setting: str) -> str:
    """KV with some settings changed."""
    changed = dict(x.split("=") for x in setting.split(","))
    base = dict(x.split("=") for x in KV.partition(":")[2].split(","))
    return "hardkv:" + ",".join(f"{k}={v}" for k, v in (base | changed).items())


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


def test_short_requests_never_trigger() -> None:
    llm = llm_of(with_setting("lower=80,upper=90"), formats=["bf16"])
    ours, full = run(llm, [prompt(30)] * 2, 40, [llm.kv.describe(), FULL])
    assert ours.token_ids == full.token_ids
    assert not cascade(llm).history


def test_a_request_may_end_where_it_would_trigger() -> None:
    llm = llm_of()
    run(llm, [prompt(50)], 60, [KV])
    at = cascade(llm).history[2].position
    whole = [int(x) for x in cascade(llm).history[1].kept.flatten()]
    for tokens in (at - 50, at - 50 + 1, at - 50 + 2):  # the last token is drawn, not fed
        llm.engine.forget("r0")
        [out] = run(llm, [prompt(50)], tokens, [KV])
        assert out.finish_reason == "length"
        assert cascade(llm).history[1].kept.flatten().tolist() == whole


def test_an_abort_gives_everything_back() -> None:
    llm = llm_of()
    for steps in range(1, 30, 3):
        name = llm.engine.add(prompt(50), greedy(60), llm.kv)
        other = llm.engine.add(prompt(40, 1), greedy(60), llm.kv)
        for _ in range(steps):
            llm.engine.step()
        llm.engine.abort(name)
        llm.engine.abort(other)
        assert llm.cache.free_pages == llm.cache.spec.num_pages


def tight(llm: LLM, pages: int) -> int:
    """Bytes of a cache like that of `llm` with so many pages."""
    spec = llm.cache.spec
    a_page = spec.page_bytes + 4
    return llm.cache.usage().allocated + (pages - spec.num_pages) * a_page


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("setting", ["p=0.5", "format=k8v4", "condense=merge", "calibrate=temperature,metric=snapkv"])
def test_a_preempted_request_ends_as_an_undisturbed_one(preemption: str, setting: str) -> None:
    kv = with_setting(setting)
    prompts = [prompt(12, i) for i in range(3)]
    roomy = llm_of(kv)
    expected = [run_alone(roomy, p, kv) for p in prompts]
    llm = llm_of(kv, kv_cache_memory_bytes=tight(roomy, 18), preemption=preemption)
    outs = run(llm, prompts, 60, [kv] * 3)
    assert sum(llm.engine.sequences(f"r{i}")[0].preemptions for i in range(3)) > 0
    for i, (out, (tokens, history)) in enumerate(zip(outs, expected, strict=True)):
        assert out.token_ids == tokens
        found = cascade(llm, f"r{i}").history
        assert len(found) == len(history)
        for ours, theirs in zip(found, history, strict=True):
            assert (ours.position, ours.rewritten, ours.deferred) == (theirs.position, theirs.rewritten, False)
            assert torch.equal(ours.kept, theirs.kept)
            assert torch.equal(ours.selected, theirs.selected)
            torch.testing.assert_close(ours.coverage, theirs.coverage)
            if ours.calibration is not None:
                assert theirs.calibration is not None
                torch.testing.assert_close(
                    ours.calibration.temperature, theirs.calibration.temperature, rtol=1e-3, atol=0
                )


def run_alone(llm: LLM, tokens: list[int], kv: str) -> tuple[list[int], list[Trigger]]:
    [out] = run(llm, [tokens], 60, [kv])
    history = cascade(llm).history
    llm.engine.forget("r0")
    return out.token_ids, history


def test_a_trigger_that_finds_no_page_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(with_setting("format=k8v4"), formats=["bf16"])

    def full_pool(*_: Any) -> None:
        raise OutOfPages("no page is free")

    real = llm.cache.rewrite
    monkeypatch.setattr(llm.cache, "rewrite", full_pool)
    llm.engine.add(prompt(30, 1), greedy(60), llm.kv, request_id="r0")
    for _ in range(30):
        llm.engine.step()
    assert [t.deferred for t in cascade(llm).history if t.rewritten] == [True] * 3
    [sequence] = llm.engine.sequences("r0")
    assert int(llm.cache.state.lengths[sequence.slot].sum(-1).min()) == sequence.seen - 10
    monkeypatch.setattr(llm.cache, "rewrite", real)
    for _ in range(10):
        llm.engine.step()
    assert not cascade(llm).history[-1].deferred
    assert int(llm.cache.state.lengths[sequence.slot].sum(-1).min()) < sequence.seen - 20
    llm.engine.abort("r0")
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_teacher_forcing_triggers_like_generation() -> None:
    llm = llm_of()
    [out] = run(llm, [prompt(60, 3)], 40, [KV])
    generated = [t.to_dict() for t in cascade(llm).history]
    forced = ForcedRun(llm.engine, [ForcedRow(prompt(60, 3), out.token_ids[:-1], llm.kv)])
    drawn = [int(logits[0].argmax()) for logits in forced]
    assert drawn == out.token_ids[1:]
    assert forced.cascades[0] is not None
    assert [t.to_dict() for t in forced.cascades[0].history] == generated


def test_completions_of_one_prompt_do_not_share_state() -> None:
    llm = llm_of()
    params = SamplingParams(temperature=1.0, max_tokens=40, n=3, seed=1, ignore_eos=True)
    [many] = llm.generate([prompt(60)], params)
    assert len({tuple(o.token_ids) for o in many.outputs}) == 3


def test_what_does_not_fit_the_engine_is_refused() -> None:
    llm = tiny_llm(FULL)
    with pytest.raises(Exception, match="open it with"):
        llm.generate([prompt(9)], greedy(2), KV)
    with pytest.raises(PolicyError, match="leave nothing of a context"):
        llm_of("hardkv:window=60", max_model_len=64)
    roomy = llm_of("hardkv:window=8", max_model_len=64, max_window=62)
    with pytest.raises(PolicyError, match="leave nothing of a context"):
        roomy.generate([prompt(9)], greedy(2), "hardkv:window=62")
    with pytest.raises(PolicyError, match="less than a page"):
        llm_of(with_setting("budget=1KiB")).generate([prompt(9)], greedy(2))
    shorter = llm_of(KV)
    with pytest.raises(PolicyError, match="reads 9 recent queries"):
        shorter.generate([prompt(9)], greedy(2), with_setting("queries=9"))


@pytest.mark.parametrize(
    "setting",
    [
        "lower=0,upper=0,interval=1",
        "lower=0,upper=0,sinks=0,queries=32",
        "lower=0,upper=0,budget=10",
        "lower=0,upper=0,budget=10,condense=merge,sinks=0",
        "lower=0,upper=0,sparse_loading=true,layout=max,interval=3",
        "lower=16,upper=16,group=max,metric=rkv,calibrate=temperature",
    ],
)
def test_extreme_settings_run(setting: str) -> None:
    llm = llm_of(with_setting(setting))
    for length in (1, 11, 50):
        [out] = run(llm, [prompt(length)], 30, [llm.kv.describe()])
        assert len(out.token_ids) == 30
        assert out.kv is not None
        if "budget" in setting:
            kept = [t.kept.max() for t in cascade(llm).history]
            assert max(kept) <= 10
        llm.engine.forget("r0")
