"""The cascade at the edges: short, ended, aborted and preempted requests, full pools, extreme settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from siftkv import LLM, SamplingParams
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.engine.triggers import Trigger
from siftkv.errors import OutOfPages, PolicyError
from tests.hardkv.requests import FULL, KV, cascade, greedy, llm_of, run, tight, with_setting
from tests.tiny import prompt, tiny_llm


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
