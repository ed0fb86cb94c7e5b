"""A decode step on a GPU as a whole: it never waits for the device, takes few launches, and examines stale tokens only
where a request asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from siftkv import LLM, SamplingParams, parse_policy
from siftkv.engine.binding import BoundPolicy
from siftkv.kernels.cuda.step import choose
from tests.gpu.test_gpu_engine import CONFIG, GREEDY, KV, open_llm, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def resident(llm: LLM, kv: list[str]) -> tuple[list[int], list[BoundPolicy]]:
    """Slots of requests whose prompts are in the cache."""
    bound = [llm.engine.bind(parse_policy(x)) for x in kv]
    slots = [llm.cache.admit(b.rule) for b in bound]
    _, failures = llm.engine.runner.prefill(prompts()[: len(kv)], slots, bound)
    assert failures == [None] * len(kv)
    return slots, bound


def test_waiting_is_noticed() -> None:
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_step_waits_for_nothing(eager: bool, count: int) -> None:
    llm = open_llm(enforce_eager=eager)
    slots, _ = resident(llm, KV[:count])
    llm.engine.runner.decode([5] * count, slots)
    with no_waiting():
        for _ in range(9):
            logits, finite = llm.engine.runner.decode([5] * count, slots)
    assert logits.shape == (count, CONFIG.vocab_size)
    assert bool(finite.all())
    llm.cache.check_integrity()


def test_a_pipelined_step_waits_for_its_tokens_only() -> None:
    llm = open_llm()
    for prompt, kv in zip(prompts(), KV, strict=True):
        llm.engine.add(prompt, GREEDY, parse_policy(kv))
    for _ in range(4):
        llm.engine.step()
    with no_waiting():
        chunks = [chunk for _ in range(12) for chunk in llm.engine.step()]
    assert len(chunks) == 12 * len(KV)


def launches(llm: LLM, slots: list[int]) -> int:
    """GPU kernels of one replayed step."""
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    tokens, at = torch.tensor([5] * len(slots), device="cuda"), torch.tensor(slots, device="cuda")
    for _ in range(2):
        graphs.launch(tokens, at).wait()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        graphs.launch(tokens, at).wait()
    names = [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


def test_launches_of_a_step() -> None:
    llm = open_llm()
    [slot], _ = resident(llm, ["diffkv"])
    plain = launches(llm, [slot])
    assert plain <= 9 * CONFIG.num_layers + 10
    [other], _ = resident(llm, ["diffkv:catch_up=1"])
    assert launches(llm, [slot]) == plain + 3, "one resident request that catches up is enough"
    llm.cache.release([other])
    assert launches(llm, [slot]) == plain


def test_requests_that_catch_up_come_and_go() -> None:
    """Graphs with and without examination take turns, and nobody's tokens change."""
    kv = ["diffkv:alpha_high=1.2,alpha_low=0.9", "diffkv:alpha_high=1.2,alpha_low=0.9,catch_up=1", "full"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (90, 30, 60)]
    found = {}
    for eager in (False, True):
        llm = open_llm(enforce_eager=eager, check_integrity=True)
        found[eager] = [(o.token_ids, o.kv and o.kv.per_head_tokens) for o in llm.generate(prompts()[:3], params, kv)]
        assert not llm.cache.examines
    assert found[False] == found[True]


def test_faults_of_a_step_end_one_request() -> None:
    llm = open_llm()
    slots, _ = resident(llm, KV)
    llm.cache.state.window_v[slots[2], 1, 0, :, 3] = torch.nan
    graphs = llm.engine.runner.graphs
    assert graphs is not None
    landing = graphs.launch(torch.tensor([5] * 5, device="cuda"), torch.tensor(slots, device="cuda"))
    _, good, free, _ = landing.wait()
    assert good == [True, True, False, True, True]
    assert free == llm.cache.free_pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("vocab", [97, 1000, 128256])
def test_choice_is_the_first_largest_logit(dtype: torch.dtype, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(8, vocab, device="cuda").to(dtype)
    logits[1] = -torch.inf
    logits[1, 55] = -3.0
    logits[2, 17], logits[2, 60] = 9.0, 9.0
    logits[3] = -logits[3].abs()
    logits[3, 40], logits[3, 41] = -0.0, 0.0
    logits[4, vocab - 1] = torch.nan
    logits[5, 3] = torch.inf
    logits[6] = -torch.inf
    not_finite = torch.zeros(9, dtype=torch.bool, device="cuda")
    not_finite[8] = True
    slots = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], device="cuda")
    out = choose(logits, not_finite, slots, torch.tensor([7, 99], device="cuda"))
    expected = logits.float().argmax(-1)
    assert torch.equal(out[:4], expected[:4])
    assert out[8:].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 7, 99]
