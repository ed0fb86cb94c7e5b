"""The engine and `LLM`: tokens, batching, cancellation, reports and errors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from siftkv import DiffKV, SamplingParams, Uniform, parse_policy
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.errors import FormatError, NumericsError, PolicyError, RequestError, SiftKVError
from siftkv.models import LoadedModel
from tests.tiny import VOCAB, prompt, tiny_llm, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

SIFTED = "diffkv:window=8,sinks=2,alpha_high=1.2,alpha_low=0.6,interval=2,catch_up=1"


def dense_greedy(model: LoadedModel, ids: list[int], count: int) -> list[int]:
    """Greedy decoding that recomputes everything at each step: no cache, no batching."""
    ids = list(ids)
    for _ in range(count):

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

        with torch.inference_mode():
            hidden = model.decoder(torch.tensor(ids), torch.arange(len(ids)), attend)
            ids.append(int(model.decoder.logits(hidden[-1:]).argmax()))
    return ids[-count:]


@pytest.fixture(params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_full_equals_decoding_without_a_cache(kernels: str) -> None:
    model = tiny_model(num_heads=6, num_kv_heads=2)
    llm = tiny_llm("full:window=8", model=model, kernels=kernels)
    prompts = [prompt(n, n) for n in (1, 2, 9, 40, 77)]
    out = llm.generate(prompts, GREEDY)
    assert [o.token_ids for o in out] == [dense_greedy(model, p, 24) for p in prompts]


@pytest.mark.parametrize("changes", [{"qkv_bias": True}, {"qk_norm": True}])
def test_thresholds_that_never_demote_equal_full_up_to_quantisation(changes: dict[str, bool]) -> None:
    model = tiny_model(architecture="Qwen2ForCausalLM", **changes)
    llm = tiny_llm("diffkv:window=8,alpha_high=0,alpha_low=0,high=k8v8", model=model, formats=["fp32"])
    ids, forced = prompt(60, 3), prompt(30, 4)
    rows = [ForcedRow(ids, forced, llm.kv), ForcedRow(ids, forced, parse_policy("full:window=8"))]
    for logits in ForcedRun(llm.engine, rows):
        p, q = logits.log_softmax(-1)
        assert float((q.exp() * (q - p)).sum()) < 1e-4


def test_batch_mates_do_not_change_tokens(kernels: str) -> None:
    llm = tiny_llm(SIFTED, formats=["fp32"], kernels=kernels)
    prompts = [prompt(n, n) for n in (50, 3, 90, 20, 33)]
    kv = [SIFTED, "full:window=8", SIFTED, "full:window=8", SIFTED]
    together = llm.generate(prompts, GREEDY, kv)
    for i, p in enumerate(prompts):
        [alone] = llm.generate(p, GREEDY, kv[i])
        assert alone.token_ids == together[i].token_ids
        assert alone.kv is not None
        assert together[i].kv is not None
        assert alone.kv.per_head_tokens == together[i].kv.per_head_tokens


def test_closing_a_stream_returns_pages() -> None:
    llm = tiny_llm()
    stream = llm.stream(prompt(50), SamplingParams(max_tokens=100, ignore_eos=True))
    seen = [next(stream) for _ in range(5)]
    assert len(seen) == 5
    assert llm.cache.free_pages < llm.cache.spec.num_pages
    stream.close()
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert not llm.engine.has_work


def test_stream_joins_to_the_generated_text() -> None:
    llm = tiny_llm()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    chunks = list(llm.stream(prompt(30), params))
    [whole] = llm.generate(prompt(30), params)
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert chunks[-1].finish_reason == "length"


def test_abort_in_every_state_leaves_the_others_alone() -> None:
    llm = tiny_llm("full:window=8", max_num_seqs=2)
    [undisturbed] = llm.generate(prompt(40, 1), GREEDY)
    engine, policy = llm.engine, llm.kv
    keep = engine.add(prompt(40, 1), GREEDY, policy)
    running = engine.add(prompt(30, 2), GREEDY, policy)
    waiting = engine.add(prompt(30, 3), GREEDY, policy)
    for _ in range(3):
        engine.step()
    for victim in (waiting, running, "no such request"):
        engine.abort(victim)
    while engine.has_work:
        engine.step()
    [sequence] = engine.sequences(keep)
    assert sequence.output_ids == undisturbed.token_ids
    assert engine.sequences(running)[0].finish_reason == "abort"
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_n_completions_with_a_seed() -> None:
    llm = tiny_llm()
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    [first], [second] = llm.generate(prompt(20), params), llm.generate(prompt(20), params)
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3


def test_ending_by_eos_stop_token_and_stop_string() -> None:
    llm = tiny_llm()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2)
    [free] = llm.generate(prompt(25, 8), params)
    token = free.token_ids[6]
    first = free.token_ids.index(token)
    [stopped] = llm.generate(
        prompt(25, 8), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[token])
    )
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.outputs[0].stop_reason == token
    word = f"t{token}"
    [texted] = llm.generate(prompt(25, 8), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=word))
    assert texted.finish_reason == "stop"
    assert word not in texted.text
    assert free.outputs[0].logprobs is not None
    assert len(free.outputs[0].logprobs) == 30
    assert all(x.logprob == max(x.top.values()) for x in free.outputs[0].logprobs)


def test_report_counts_every_entry() -> None:
    llm = tiny_llm(SIFTED)
    [out] = llm.generate(prompt(100), GREEDY)
    kv = out.kv
    assert kv is not None
    heads = llm.cache.spec.head_slots
    assert kv.tokens_seen == 100 + 23
    assert sum(kv.tokens_by_tier.values()) == kv.tokens_seen * heads
    assert kv.tokens_by_tier["window"] == (8 + 2) * heads
    assert kv.physical_bytes <= kv.peak_bytes
    assert kv.bf16_bytes == kv.tokens_seen * heads * 16 * 4
    assert torch.tensor(kv.per_head_tokens).sum((0, 1)).tolist() == list(kv.tokens_by_tier.values())


def test_one_bad_request_does_not_hurt_the_others() -> None:
    model = tiny_model()
    llm = tiny_llm("full:window=8", model=model)
    prompts = [[t for t in prompt(30, i) if t != 50] for i in range(3)]
    good = llm.generate(prompts, GREEDY)
    assert all(50 not in o.token_ids for o in good)
    with torch.no_grad():
        model.decoder.embedding[50] = float("nan")
    with pytest.raises(NumericsError, match="request-") as caught:
        llm.generate([prompts[0], [*prompts[1], 50, 3], prompts[2]], GREEDY)
    outputs = caught.value.outputs  # type: ignore[attr-defined]
    assert [outputs[i].token_ids for i in (0, 2)] == [good[i].token_ids for i in (0, 2)]
    assert outputs[1].finish_reason == "abort"
    assert llm.cache.free_pages == llm.cache.spec.num_pages


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ({"prompts": [[]]}, RequestError, "empty"),
        ({"prompts": [""]}, RequestError, "empty"),
        ({"prompts": [prompt(600)]}, RequestError, "600 tokens"),
        ({"prompts": [[1, VOCAB]]}, RequestError, "outside the vocabulary"),
        ({"prompts": [[-1]]}, RequestError, "outside the vocabulary"),
        ({"prompts": [[1]], "kv": "nope"}, PolicyError, "diffkv"),
        ({"prompts": [[1]], "kv": "diffkv:alpha=1"}, PolicyError, "alpha_high"),
        ({"prompts": [[1]], "kv": "diffkv:alpha_low=2,alpha_high=1"}, PolicyError, "above"),
        ({"prompts": [[1]], "kv": "uniform:k8v2"}, FormatError, "k8v4, k4v2"),
        ({"prompts": [[1]], "kv": "diffkv:window=500"}, PolicyError, "window"),
        ({"prompts": [[1], [2]], "kv": ["full"]}, RequestError, "2 prompts"),
        ({"prompts": [[1]], "sampling_params": "greedy"}, RequestError, "SamplingParams"),
    ],
)
def test_bad_requests(bad: dict[str, object], error: type[Exception], match: str) -> None:
    llm = tiny_llm()
    with pytest.raises(error, match=match):
        llm.generate(**bad)  # type: ignore[arg-type]
    assert not llm.engine.has_work
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert len(llm.generate([3, 4], SamplingParams(max_tokens=2))) == 1, "it lives on"


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ({"kv": "diffkv:high=k5v4"}, FormatError, "k5v4"),
        ({"max_model_len": 100_000}, RequestError, "512"),
        ({"max_model_len": 0}, RequestError, "max_model_len"),
        ({"kv_cache_memory_bytes": 1000}, SiftKVError, "too small"),
        ({"max_num_seqs": 0}, SiftKVError, "max_num_seqs"),
        ({"conditioning": "magic"}, SiftKVError, "conditioning"),
        ({"kernels": "magic"}, SiftKVError, "kernels"),
        ({"preemption": "magic"}, SiftKVError, "preemption"),
        ({"formats": ["k9v9"]}, FormatError, "k9v9"),
        ({"formats": ["k8v8", "k4v4", "k8v2"]}, FormatError, "formats"),
    ],
)
def test_bad_settings(bad: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        tiny_llm(**({"kv": "diffkv"} | bad))  # type: ignore[arg-type]


def test_context_limit_ends_a_request() -> None:
    llm = tiny_llm(max_model_len=40)
    [out] = llm.generate([prompt(30)], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(out.token_ids) == 10
    assert out.finish_reason == "length"


def test_policies_as_objects_and_per_head_thresholds() -> None:
    per_head = DiffKV(alpha_high=[[1.0, 0.0], [2.0, 3.0]], alpha_low=[0.0, 0.5], window=8, sinks=0)
    llm = tiny_llm(per_head)
    [out] = llm.generate([prompt(100)], GREEDY)
    assert out.kv is not None
    counts = torch.tensor(out.kv.per_head_tokens)
    low = [t.name for t in llm.cache.spec.tiers].index("k4v2")
    assert int(counts[0, 1, low]) == 0, "alpha_high=0 keeps all of this head's tokens high"
    assert int(counts[1, 1, low]) > 0
    with pytest.raises(PolicyError, match="shape"):
        tiny_llm(DiffKV(alpha_high=[1.0, 1.0, 1.0], alpha_low=0.0, window=8))
    assert Uniform("k4v4").describe().startswith("uniform:format=k4v4")


def test_qwen_like_biases_survive_four_bit_keys_with_conditioning() -> None:
    """Large key biases destroy 4-bit keys; subtracting the rotated bias brings them back."""
    model = tiny_model(architecture="Qwen2ForCausalLM", qkv_bias=True, head_dim=32, hidden_size=64)
    with torch.no_grad():
        for layer in model.decoder.layers:
            rows = slice(4 * 32, 6 * 32)
            channels = torch.zeros(2, 32)
            channels[:, [13, 15, 29, 31]] = torch.tensor([40.0, -60.0, 25.0, 90.0])
            assert layer.qkv_bias is not None
            layer.qkv_bias[rows] += channels.flatten()
    divergence = {}
    for conditioning in ("none", "full"):
        llm = tiny_llm("uniform:k4v4,window=8", model=model, formats=["fp32"], conditioning=conditioning)
        ids, forced = prompt(200, 1), prompt(40, 2)
        rows = [ForcedRow(ids, forced, llm.kv), ForcedRow(ids, forced, parse_policy("full:window=8"))]
        total = 0.0
        for logits in ForcedRun(llm.engine, rows):
            p, q = logits.double().log_softmax(-1)
            total += float((q.exp() * (q - p)).sum()) / 40
        divergence[conditioning] = total
    assert divergence["full"] < divergence["none"] / 5, divergence


def test_nan_while_decoding_does_not_poison_the_slot(kernels: str) -> None:
    model = tiny_model()
    llm = tiny_llm("full:window=8", model=model, kernels=kernels, max_num_seqs=1)
    [healthy] = llm.generate([prompt(20, 5)], GREEDY)
    real = llm.engine.runner.decode

    def broken(token_ids: list[int], slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        out = real(token_ids, slots)
        llm.cache.state.window_v[slots] = float("nan")
        return out

    llm.engine.runner.decode = broken  # type: ignore[method-assign]
    with pytest.raises(NumericsError):
        llm.generate([prompt(30, 6)], GREEDY)
    llm.engine.runner.decode = real  # type: ignore[method-assign]
    [again] = llm.generate([prompt(20, 5)], GREEDY)
    assert again.token_ids == healthy.token_ids


def test_interleaved_streams_lose_nothing() -> None:
    llm = tiny_llm()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [prompt(30, 1), prompt(25, 2)]
    whole = [o.text for o in llm.generate(prompts, params)]
    streams = [llm.stream(p, params) for p in prompts]
    texts = ["", ""]
    for chunks in zip(*streams):
        for i, chunk in enumerate(chunks):
            texts[i] += chunk.text
    assert texts == whole
    stream = llm.stream(prompts[0], params)
    first = next(stream).text
    llm.generate(prompts[1], params)
    assert first + "".join(c.text for c in stream) == whole[0]
    with pytest.raises(RequestError, match="empty"):
        llm.stream([])


@pytest.mark.parametrize("bad", [[[5, "a"]], [None], [{"prompt": "x"}], [[5, 2.7]], {"prompt": "x"}, 7, [[True]]])
def test_odd_prompts_are_named(bad: object) -> None:
    llm = tiny_llm()
    with pytest.raises(RequestError):
        llm.generate(bad)  # type: ignore[arg-type]
    assert llm.generate([torch.tensor([3, 4])], GREEDY)[0].finish_reason == "length"  # type: ignore[list-item]


def test_a_pool_without_scores_is_not_given_to_a_policy_that_reads_them() -> None:
    llm = tiny_llm("uniform:k4v2,window=8")
    with pytest.raises(FormatError):
        llm.generate([prompt(9)], GREEDY, "diffkv:window=8")
    both = tiny_llm("uniform:k8v4,window=8", formats=["k4v2"])
    [out] = both.generate([prompt(200)], GREEDY, "diffkv:window=8,alpha_high=2")
    [own] = tiny_llm("diffkv:window=8,alpha_high=2").generate([prompt(200)], GREEDY)
    assert out.kv is not None
    assert own.kv is not None
    assert out.kv.tokens_by_tier == own.kv.tokens_by_tier


def test_many_policies_do_not_pile_up() -> None:
    llm = tiny_llm()
    for i in range(300):
        llm.engine.bind(parse_policy(f"diffkv:window=8,alpha_low={i / 1000}"))
    assert len(llm.engine._policies) <= 256


def test_value_conditioning_is_exact() -> None:
    """Biases moved and values rotated in the weights: the full cache answers as before, up to float32 rounding."""
    changes = {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "num_heads": 6}
    plain = tiny_llm("full:window=8", model=tiny_model(**changes), conditioning="none")
    folded = tiny_llm("full:window=8", model=tiny_model(**changes), conditioning="full")
    assert folded.model.decoder.values_conditioned
    assert not torch.equal(folded.model.decoder.layers[0].o, plain.model.decoder.layers[0].o)
    row = [prompt(40, 1), prompt(10, 2)]
    for a, b in zip(*(ForcedRun(x.engine, [ForcedRow(*row, x.kv)]) for x in (plain, folded))):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    again = tiny_llm("full:window=8", model=folded.model)
    [out], [same] = again.generate([prompt(20)], GREEDY), folded.generate([prompt(20)], GREEDY)
    assert out.token_ids == same.token_ids
