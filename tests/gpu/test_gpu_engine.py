"""The engine on a GPU: graphs, pipelined steps and eager steps give the same tokens; so does the CPU up to rounding."""

from __future__ import annotations

import pytest
import torch

from siftkv import LLM, SamplingParams, parse_policy
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.models import LoadedModel, ModelConfig, random_model
from tests.tiny import tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG = ModelConfig("LlamaForCausalLM", 97, 256, 512, 4, 8, 2, 64, 2048, eos_token_ids=(0,))
KV = ["diffkv:alpha_high=1.2,alpha_low=0.3,catch_up=1", "full", "full", "diffkv", "diffkv:alpha_low=0,interval=1"]
LENGTHS = (300, 7, 90, 500, 64)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (n,), generator=generator).tolist() for n in LENGTHS]


def open_llm(device: str = "cuda", kv: str = "diffkv", eos: tuple[int, ...] = (0,), **settings: object) -> LLM:
    decoder = random_model(CONFIG, 0, torch.float32, "cpu").to(torch.bfloat16).to(device)
    model = LoadedModel(CONFIG, decoder, tiny_tokenizer(), "tiny")
    defaults: dict[str, object] = {"max_num_seqs": 5, "max_model_len": 1024, "formats": ["bf16"]}
    defaults |= {"kv_cache_memory_bytes": 1 << 29, "admission": "greedy"}
    return LLM(model, kv, **(defaults | settings))  # type: ignore[arg-type]


GREEDY = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)


def test_graphs_and_eager_steps_give_the_same_tokens() -> None:
    eager = open_llm(enforce_eager=True, check_integrity=True).generate(prompts(), GREEDY, KV)
    llm = open_llm(check_integrity=True)
    graphs = llm.generate(prompts(), GREEDY, KV)
    assert [o.token_ids for o in graphs] == [o.token_ids for o in eager]
    for ours, theirs in zip(graphs, eager, strict=True):
        assert ours.kv is not None
        assert theirs.kv is not None
        assert ours.kv.per_head_tokens == theirs.kv.per_head_tokens
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_a_graph_captured_short_replays_long() -> None:
    """Lengths grow by far more than what they were at capture, through many pages and both tiers."""
    llm = open_llm(max_model_len=2048)
    llm.generate([[5]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
    long = llm.generate([prompts()[3]], params)[0].token_ids
    eager = open_llm(max_model_len=2048, enforce_eager=True).generate([prompts()[3]], params)[0].token_ids
    assert long == eager


def test_pipelined_requests_end_where_they_should() -> None:
    """Stop tokens are only seen a step late; what was computed beyond them is thrown away and its pages return."""
    llm = open_llm()
    free = llm.generate(prompts(), GREEDY, KV)
    stops = [o.token_ids[9 + i] for i, o in enumerate(free)]
    params = [SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, stop_token_ids=[t]) for t in stops]
    cut = llm.generate(prompts(), params, KV)
    for whole, short, stop in zip(free, cut, stops, strict=True):
        assert short.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert short.finish_reason == "stop"
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    llm.cache.check_integrity()


def test_more_requests_than_slots_and_sampled_ones_among_them() -> None:
    llm = open_llm(check_integrity=True)
    many = prompts() * 3
    params = [
        SamplingParams(temperature=0.8 * (i % 3 == 2), seed=i, max_tokens=30 + i, ignore_eos=True) for i in range(15)
    ]
    together = llm.generate(many, params, KV * 3)
    alone = [llm.generate([p], s, k)[0] for p, s, k in zip(many, params, KV * 3, strict=True)]
    same = sum(a.token_ids == b.token_ids for a, b in zip(together, alone, strict=True))
    assert same >= 6, "16-bit products of other batch sizes round differently; many requests still agree"
    assert all(len(o.token_ids) == 30 + i for i, o in enumerate(together))


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_pages_that_run_out_preempt(preemption: str) -> None:
    roomy = open_llm(kv="full", formats=[])
    spec = roomy.cache.spec
    budget = roomy.cache.usage().allocated + (420 - spec.num_pages) * (spec.page_bytes + 4)
    llm = open_llm(kv="full", formats=[], kv_cache_memory_bytes=budget, preemption=preemption, check_integrity=True)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    tight = llm.generate(prompts(), params)
    assert all(len(o.token_ids) == 150 for o in tight)
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_close_to_the_cpu_engine() -> None:
    ids, forced = prompts()[3], prompts()[0]
    logits = {}
    for device in ("cpu", "cuda"):
        llm = open_llm(device, kernels="reference" if device == "cpu" else "auto")
        rows = [ForcedRow(ids, forced, parse_policy(k)) for k in ("full", "diffkv:alpha_low=0")]
        logits[device] = torch.stack([x.float().cpu().log_softmax(-1) for x in ForcedRun(llm.engine, rows)])
    divergence = (logits["cpu"].exp() * (logits["cpu"] - logits["cuda"])).sum(-1).mean(0)
    assert bool((divergence < 1e-3).all()), divergence
