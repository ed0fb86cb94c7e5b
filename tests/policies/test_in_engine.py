"""Every baseline through the real cache: budgets hold, bytes are freed, and a policy that drops nothing is `full`."""

from __future__ import annotations

import pytest
import torch

from siftkv import LLM, SamplingParams
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.policies import DuoAttention, parse_policy
from tests.tiny import prompt, tiny_llm

STEPS, LENGTH = 40, 120

CUT = [
    "snapkv:budget=48,window=16",
    "pyramidkv:budget=48",
    "adakv:budget=48,window=16",
    "rkv:budget=48",
    "expected:budget=48,future=32",
]
HELD = ["h2o:budget=48", "h2o:budget=48,window=8,interval=4", "tova:budget=48", "streaming:budget=48"]


def forced(llm: LLM, kv: list[str], steps: int = STEPS) -> tuple[torch.Tensor, ForcedRun]:
    """Logits `[steps, B, vocab]` of one text under several policies."""
    rows = [ForcedRow(prompt(LENGTH), prompt(steps, 1), parse_policy(x)) for x in kv]
    run = ForcedRun(llm.engine, rows)
    return torch.stack([x.clone() for x in run]), run


def kept_a_head(llm: LLM, kv: str) -> list[int]:
    """Smallest and largest number of tokens a head keeps after prompt and after decoding, window and sinks included."""
    row = ForcedRow(prompt(LENGTH), prompt(STEPS, 1), parse_policy(kv))
    found = []
    for step, _ in enumerate(ForcedRun(llm.engine, [row])):
        state = llm.cache.state
        slot = int(state.seen.argmax())
        if step in (0, STEPS - 1):
            near = row.policy.window + row.policy.sinks
            total = state.lengths[slot].sum(-1) + near
            found += [int(total.min()), int(total.max())]
        llm.cache.check_integrity()
    return found


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("kv", HELD)
def test_held_budgets_hold(kv: str, kernels: str) -> None:
    llm = tiny_llm(kv, kv_cache_memory_bytes=6 << 20, kernels=kernels)
    assert kept_a_head(llm, kv) == [48, 48, 48, 48]


@pytest.mark.parametrize("kv", CUT)
def test_prompts_are_cut_and_decoded_tokens_stay(kv: str) -> None:
    llm = tiny_llm(kv, kv_cache_memory_bytes=6 << 20)
    first_least, first_most, last_least, last_most = kept_a_head(llm, kv)
    grown = STEPS - 1
    assert (last_least, last_most) == (first_least + grown, first_most + grown)
    if not kv.startswith(("pyramidkv", "adakv")):
        assert first_least == first_most == 48 + 1
    else:
        assert first_least < 48 + 1 < first_most, "heads or layers differ"


@pytest.mark.parametrize(
    "kv",
    [
        *(f"{name}:ratio=1" for name in ("snapkv", "pyramidkv", "adakv", "rkv", "expected")),
        "h2o:ratio=1,length=200",
        "tova:ratio=1,length=200",
        "streaming:budget=200",
        "duo:sparsity=0,window=16,sinks=4",
    ],
)
def test_what_drops_nothing_is_full(kv: str) -> None:
    llm = tiny_llm(kv, kv_cache_memory_bytes=6 << 20)
    expected, _ = forced(tiny_llm("full", kv_cache_memory_bytes=6 << 20), ["full"])
    logits, _ = forced(llm, [kv])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv", ["int8", "int4", "snapkv:format=k4v4,budget=64", "duo:window=16,sinks=4"])
def test_bytes_are_freed(kv: str) -> None:
    everything = "full:window=16,sinks=4"
    full = forced(tiny_llm(everything, kv_cache_memory_bytes=6 << 20), [everything])[1].reports[0]
    run = forced(tiny_llm(kv, kv_cache_memory_bytes=6 << 20), [kv])[1]
    assert run.reports[0].physical_bytes < full.physical_bytes


def test_several_share_a_batch_and_stay_themselves() -> None:
    policies = ["snapkv:budget=48,window=16", "expected:budget=48", "adakv:budget=40,window=16", "full"]
    llm = tiny_llm("snapkv:budget=48,window=16", kv_cache_memory_bytes=6 << 20)
    together, _ = forced(llm, policies, 12)
    for index, kv in enumerate(policies):
        alone, _ = forced(llm, [kv], 12)
        torch.testing.assert_close(together[:, index], alone[:, 0], rtol=1e-4, atol=1e-4)


def test_streaming_heads_hold_nothing_beyond_the_window() -> None:
    llm = tiny_llm("duo:window=16,sinks=4", kv_cache_memory_bytes=6 << 20)
    policy = DuoAttention(heads=[[1, 0], [0, 1]], window=16, sinks=4)
    row = ForcedRow(prompt(LENGTH), prompt(STEPS, 1), policy)
    for _ in ForcedRun(llm.engine, [row]):
        lengths = llm.cache.state.lengths.sum(-1).amax(0)
    assert lengths.tolist() == [[LENGTH + STEPS - 20, 0], [0, LENGTH + STEPS - 20]]


@pytest.mark.parametrize("kv", [*CUT, *HELD, "quest:budget=48", "duo:window=16,sinks=4", "int4"])
def test_generation_is_the_same_in_company(kv: str) -> None:
    llm = tiny_llm(kv, kv_cache_memory_bytes=6 << 20)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [prompt(70, 3), prompt(90, 4)]
    together = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    alone = [llm.generate([x], params)[0].outputs[0].token_ids for x in prompts]
    assert together == alone
    assert llm.cache.free_pages == llm.cache.spec.num_pages
