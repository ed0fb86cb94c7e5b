"""Requests stepped by hand, and requests handed out as they end: the tokens of `generate`, and every page back."""

from __future__ import annotations

import pytest

from siftkv import SamplingParams, parse_policy
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.errors import OutOfPages, RequestError
from siftkv.evaluate.generation import Request, complete
from siftkv.evaluate.stepping import Script, SteppedRow, step_rows
from tests.tiny import prompt, tiny_llm

KV = "diffkv:window=8,sinks=2,alpha_low=0.5"
PROMPTS = [prompt(n, seed=n) for n in (40, 70, 11)]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


def test_stepping_generates_what_generate_does() -> None:
    llm = tiny_llm(KV)
    wanted = llm.generate(PROMPTS, GREEDY)
    script = Script([[]] * 3, [9] * 3, ())
    reports = step_rows(llm.engine, [SteppedRow(ids, llm.kv) for ids in PROMPTS], script)
    assert script.generated == [o.token_ids for o in wanted]
    for report, output in zip(reports, wanted, strict=True):
        assert output.kv is not None
        assert report.per_head_tokens == output.kv.per_head_tokens
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    llm.cache.check_integrity()


@pytest.mark.parametrize(
    "kv",
    ["hardkv:p=0.3,window=8,sinks=2,lower=16,upper=32,interval=4,queries=4", "quest:0.3,window=4,dense_layers=0"],
)
def test_policies_that_act_between_steps_do_so(kv: str) -> None:
    llm = tiny_llm(kv)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = llm.generate(PROMPTS, params)
    plain = tiny_llm("full").generate(PROMPTS, params)
    assert [o.token_ids for o in wanted] != [o.token_ids for o in plain]
    script = Script([[]] * 3, [40] * 3, ())
    reports = step_rows(llm.engine, [SteppedRow(ids, llm.kv) for ids in PROMPTS], script)
    assert script.generated == [o.token_ids for o in wanted]
    for report, output in zip(reports, wanted, strict=True):
        assert output.kv is not None
        assert report.per_head_tokens == output.kv.per_head_tokens


def test_a_script_is_fed_first_and_rows_end_for_themselves() -> None:
    llm = tiny_llm("full")
    whole = llm.generate([PROMPTS[0]], GREEDY)[0].token_ids
    script = Script([PROMPTS[0][30:], [], []], [9, 1, 4], (whole[2],))
    rows = [SteppedRow(ids, llm.kv) for ids in (PROMPTS[0][:30], PROMPTS[1], PROMPTS[2])]
    reports = step_rows(llm.engine, rows, script)
    assert script.generated[0] == whole[: whole.index(whole[2]) + 1]
    assert len(script.generated[1]) == 1
    assert [r.tokens_seen for r in reports[:2]] == [39 + len(script.generated[0]), 70]


def test_pages_come_back_when_a_run_fails() -> None:
    llm = tiny_llm("full", kv_cache_memory_bytes=260_000)
    with pytest.raises(OutOfPages):
        step_rows(llm.engine, [SteppedRow(prompt(400), llm.kv)] * 4, Script([[]] * 4, [9] * 4, ()))
    with pytest.raises(RequestError):
        step_rows(llm.engine, [SteppedRow([5], llm.kv), SteppedRow([999], llm.kv)], Script([[]] * 2, [2] * 2, ()))
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_completions_come_as_they_end_and_an_early_stop_frees_the_rest() -> None:
    llm = tiny_llm(KV)
    lengths = (9, 2, 5)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    requests = [Request(str(n), ids, p) for n, ids, p in zip(lengths, PROMPTS, params, strict=True)]
    found = list(complete(llm.engine, parse_policy(KV), requests))
    assert [key for key, *_ in found] == ["2", "5", "9"]
    wanted = llm.generate(PROMPTS, params)
    assert [output.token_ids for _, output, _ in sorted(found)[::-1]] == [wanted[i].token_ids for i in (0, 2, 1)]
    assert all(seconds >= 0 for *_, seconds in found)
    assert sum(seconds for *_, seconds in found) > 0
    run = complete(llm.engine, llm.kv, requests)
    next(run)
    run.close()
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert not llm.engine.has_work


def test_a_row_without_a_prompt_is_refused() -> None:
    llm = tiny_llm("full")
    with pytest.raises(RequestError, match="empty prompt"):
        ForcedRun(llm.engine, [ForcedRow([], [5, 6], llm.kv)])
