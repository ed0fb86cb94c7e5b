"""QAQ: bits by what attention makes of an error, outliers apart."""

from __future__ import annotations

import math

import pytest
import torch

from siftkv import SamplingParams
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.errors import FormatError, PolicyError
from siftkv.formats import PageLayout, Tier, TierFormat
from siftkv.kernels import reference
from siftkv.kernels.reference.quantize import decode, encode
from siftkv.policies import QAQ, parse_policy
from siftkv.policies.qaq import FORMATS
from tests.policies.views import D, G, H, N, R, attention, view_of
from tests.tiny import prompt, tiny_llm, tiny_model

DIM = 64


def layout_of(name: str, dim: int = DIM) -> PageLayout:
    return PageLayout(Tier(TierFormat.parse(name), scores=False, positions=False), dim, 1 << 14)


@pytest.mark.parametrize(("bits", "outliers"), [(2, 1), (4, 1), (4, 2), (8, 1)])
def test_outliers_come_back_exactly_and_the_others_between_their_extremes(bits: int, outliers: int) -> None:
    layout = layout_of(f"k{bits}v{bits}o{outliers}")
    k, v = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0))
    k[:, 3], k[:, 60] = 200.0, -150.0
    found = decode(layout, encode(layout, k, v, torch.zeros(5), torch.zeros(5, dtype=torch.int64)))[:2]
    for x, y in zip((k, v), found, strict=True):
        for token in range(5):
            order = x[token].argsort()
            apart = torch.cat([order[:outliers], order[-outliers:]])
            assert torch.equal(y[token, apart], x[token, apart].half().float())
            inside = order[outliers:-outliers]
            low, high = x[token, inside].min().half().float(), x[token, inside].max()
            scale = ((x[token, inside].max() - x[token, inside].min()) / (2**bits - 1)).half().float()
            expected = ((x[token, inside] - low) / scale).round().clamp(0, 2**bits - 1) * scale + low
            torch.testing.assert_close(y[token, inside], expected)
            assert float((y[token, inside] - x[token, inside]).abs().max()) < 0.51 * float(scale) + 0.01, high


def test_bytes_of_outliers_are_counted() -> None:
    assert layout_of("k4v4o1").token_bytes - layout_of("k4v4").token_bytes == 2 * 2 * 3
    assert layout_of("k4v4o2").token_bytes - layout_of("k4v4").token_bytes == 2 * 4 * 3


def test_bits_follow_the_formulas() -> None:
    policy = QAQ(key_error=40.0, value_error=0.5, last=5)
    view = view_of(policy)
    assert view.k is not None
    assert view.v is not None
    tier = policy.classify(view)
    seen = set()
    for one in range(R):
        for head in range(H):
            a = torch.stack([attention(view, one, head, g)[-5:] for g in range(G)]).amax((0, 1)).double()
            slope = (torch.diag(a) - a[:, None] * a).abs().amax(-1)
            key, value = (x[one, :, head].sort(-1).values for x in (view.k, view.v))
            errors = math.sqrt(40.0 / D) / N / (3.0 * slope), math.sqrt(0.5) / N / a
            wanted = [
                torch.log2((x[:, -2] - x[:, 1]) / (2 * error) + 1).ceil().clamp(2, 8)
                for x, error in zip((key, value), errors, strict=True)
            ]
            for token in range(N):
                formats = [TierFormat.parse(name) for name in FORMATS]
                enough = [
                    i
                    for i, f in enumerate(formats)
                    if f.key_bits >= wanted[0][token] and f.value_bits >= wanted[1][token]
                ]
                assert int(tier[one, head, token]) == enough[-1], (one, head, token)
                seen.add(enough[-1])
    assert seen == {0, 1, 2}, "every format is used"


def test_larger_errors_take_fewer_bits_and_nothing_is_dropped() -> None:
    model, held = tiny_model(head_dim=32), []
    for error in ("key_error=1e-9,value_error=1e-9", "key_error=5,value_error=0.5", "key_error=1e9,value_error=1e9"):
        llm = tiny_llm(f"qaq:{error}", model=model, kv_cache_memory_bytes=4 << 20)
        run = ForcedRun(llm.engine, [ForcedRow(prompt(150), prompt(60, 1), parse_policy(f"qaq:{error}"))])
        for _ in run:
            llm.cache.check_integrity()
        held.append([run.reports[0].tokens_by_tier[name] for name in (*FORMATS, "dropped")])
    (high, *_), middle, (*_, low, nothing) = held
    assert high == low == sum(middle) > max(middle[:3])
    assert nothing == middle[3] == 0


def test_decoding_keeps_the_shares_of_the_prompt() -> None:
    kv, model = "qaq:key_error=5,value_error=0.5", tiny_model(head_dim=32)
    llm = tiny_llm(kv, model=model, kv_cache_memory_bytes=4 << 20)
    first = None
    for step, _ in enumerate(ForcedRun(llm.engine, [ForcedRow(prompt(150), prompt(100, 1), parse_policy(kv))])):
        held = llm.cache.state.lengths[int(llm.cache.state.seen.argmax())].float()
        first = held / 134 if step == 0 else first
    assert first is not None
    last = held / 250
    assert (last[..., 0] <= first[..., 0] + 0.02).all()
    assert (last[..., :2].sum(-1) <= first[..., :2].sum(-1) + 0.03).all()
    assert (last.sum(-1) - 234 / 250).abs().max() < 0.01


def test_generation_is_the_same_in_company() -> None:
    kv, model = "qaq:key_error=5,value_error=0.5", tiny_model(head_dim=32)
    llm = tiny_llm(kv, model=model, kv_cache_memory_bytes=4 << 20)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [prompt(70, 3), prompt(90, 4)]
    together = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    assert together == [llm.generate([x], params)[0].outputs[0].token_ids for x in prompts]
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_only_the_reference_kernels_serve_it_and_settings_are_checked() -> None:
    model = tiny_model(head_dim=32)
    assert tiny_llm("qaq", model=model, kernels="auto").cache.kernels is reference
    with pytest.raises(FormatError, match="do not serve k8v8o1"):
        tiny_llm("qaq", model=model, kernels="numba")
    for kv, match in (("qaq:key_error=0", "above 0"), ("qaq:last=0", "last"), ("qaq:interval=0", "interval")):
        with pytest.raises(PolicyError, match=match):
            parse_policy(kv)
