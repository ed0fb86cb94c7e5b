"""KIVI: keys by channel, values by token, in groups of 32."""

from __future__ import annotations

import pytest
import torch

from siftkv import LLM, SamplingParams
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.errors import FormatError, PolicyError
from siftkv.formats import PageLayout, Tier, TierFormat
from siftkv.kernels import reference
from siftkv.kernels.reference.quantize import decode, encode
from siftkv.policies import Kivi, parse_policy
from tests.policies.views import H, R, view_of
from tests.tiny import prompt, tiny_llm, tiny_model

DIM = 64


def layout_of(bits: int, dim: int = DIM) -> PageLayout:
    return PageLayout(Tier(TierFormat.parse(f"k{bits}v{bits}t"), scores=False), dim, 1 << 14)


def formula(x: torch.Tensor, bits: int) -> torch.Tensor:
    """KIVI's asymmetric rounding of one group of numbers, in its fp16 metadata."""
    zero, scale = x.min().half().float(), ((x.max() - x.min()) / (2**bits - 1)).half().float()
    return ((x - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


@pytest.mark.parametrize("bits", [2, 4])
def test_keys_are_quantised_by_channel_and_values_by_token(bits: int) -> None:
    layout = layout_of(bits)
    k, v = torch.randn(2, 3, 96, DIM, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 9, DIM)
    position = torch.arange(96).expand(3, -1)
    found_k, found_v, _, found_position = decode(layout, encode(layout, k, v, torch.zeros(3, 96), position))
    for head in range(3):
        for channel in range(DIM):
            for start in (0, 32, 64):
                group = k[head, start : start + 32, channel]
                torch.testing.assert_close(found_k[head, start : start + 32, channel], formula(group, bits))
        for token in range(96):
            for start in (0, 32):
                group = v[head, token, start : start + 32]
                torch.testing.assert_close(found_v[head, token, start : start + 32], formula(group, bits))
    assert torch.equal(found_position, position)


def test_an_outlier_channel_costs_only_itself() -> None:
    k = torch.randn(32, DIM, generator=torch.Generator().manual_seed(1))
    k[:, 5] += 300.0
    found = {}
    for name in ("k4v4t", "k4v4"):
        layout = PageLayout(Tier(TierFormat.parse(name), scores=False), DIM, 1 << 14)
        found[name] = decode(layout, encode(layout, k, k, torch.zeros(32), torch.arange(32)))[0]
    others = torch.arange(DIM) != 5
    error = {name: float((x - k)[:, others].square().mean()) for name, x in found.items()}
    assert error["k4v4t"] < 0.05 < 0.5 < error["k4v4"]


@pytest.mark.parametrize(("bits", "dim"), [(2, 64), (4, 64), (2, 128)])
def test_bytes_are_codes_and_a_scale_and_zero_point_for_32(bits: int, dim: int) -> None:
    assert layout_of(bits, dim).token_bytes == 2 * dim * (bits + 32 / 32) / 8 + 4, "4 bytes are the position"
    with pytest.raises(FormatError, match="multiple of 32"):
        layout_of(bits, 16)


@pytest.mark.parametrize("length", [20, 90, 127])
def test_whole_groups_of_a_prompt_are_quantised(length: int) -> None:
    policy = Kivi(window=24, sinks=2)
    view = view_of(policy, length)
    tier = policy.classify(view)
    whole = max(0, length - 26) // 32 * 32
    assert tier.shape == (R, H, length)
    assert (tier[..., 2:-24] == 1).sum(-1).eq(whole).all()
    assert tier[0, 0, 2 : 2 + whole].eq(1).all(), "the oldest"
    assert tier.min() == 0, "nothing is dropped"


def run_of(llm: LLM, length: int, steps: int, kv: str) -> tuple[torch.Tensor, ForcedRun]:
    run = ForcedRun(llm.engine, [ForcedRow(prompt(length), prompt(steps, 1), parse_policy(kv))])
    return torch.stack([x.clone() for x in run]), run


def test_tokens_wait_for_their_group_and_move_as_the_formula_says() -> None:
    kv, model = "kivi:2,window=16", tiny_model(head_dim=32)
    llm = tiny_llm(kv, model=model, kv_cache_memory_bytes=4 << 20)
    row = ForcedRow(prompt(70), prompt(50, 1), parse_policy(kv))
    cache, before, seen = llm.cache, None, []
    for step, _ in enumerate(ForcedRun(llm.engine, [row])):
        slot = int(cache.state.seen.argmax())
        lengths = cache.state.lengths[slot]
        assert (lengths == lengths[0, 0]).all()
        seen.append(lengths[0, 0].tolist())
        total = 70 + step + 1 - 16
        assert sum(seen[-1]) == total
        assert seen[-1][1] % 32 == 0
        now = cache.tokens(1, slot, values=True)
        assert torch.equal(now.position[0], torch.arange(71 + step))
        if before is not None and seen[-1][1] > seen[-2][1]:
            first = seen[-2][1]
            for channel in range(32):
                group = before.k[0, first : first + 32, channel]
                torch.testing.assert_close(now.k[0, first : first + 32, channel], formula(group, 2))
            torch.testing.assert_close(now.v[1, first], formula(before.v[1, first], 2))
        before = now
        cache.check_integrity()
    waiting = [dense for dense, _ in seen]
    assert max(waiting) <= 33, "31 that wait, and one more before and after a step"
    assert sorted({quantised for _, quantised in seen}) == [32, 64, 96]


def test_it_stays_close_to_the_full_cache_and_smaller() -> None:
    model = tiny_model(head_dim=32)
    full, everything = run_of(tiny_llm("full", model=model), 100, 60, "full")
    kl, sizes = {}, {}
    for bits in (2, 4):
        logits, run = run_of(tiny_llm(f"kivi:{bits},window=16", model=model), 100, 60, f"kivi:{bits},window=16")
        p, q = full.log_softmax(-1), logits.log_softmax(-1)
        kl[bits], sizes[bits] = float((p.exp() * (p - q)).sum(-1).mean()), run.reports[0].physical_bytes
    assert 1e-9 < kl[4] < kl[2] < 0.05
    assert sizes[2] < sizes[4] < everything.reports[0].physical_bytes


def test_generation_is_the_same_in_company_and_after_preemption() -> None:
    kv, params = "kivi:4,window=8", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    model = tiny_model(head_dim=32)
    prompts = [prompt(70, 3), prompt(90, 4), prompt(80, 5)]
    roomy = tiny_llm(kv, model=model, kv_cache_memory_bytes=4 << 20)
    alone = [roomy.generate([x], params)[0].outputs[0].token_ids for x in prompts]
    together = roomy.generate(prompts, params)
    assert [out.outputs[0].token_ids for out in together] == alone
    assert roomy.cache.free_pages == roomy.cache.spec.num_pages
    for preemption in ("swap", "recompute"):
        tight = tiny_llm(kv, model=model, kv_cache_memory_bytes=462 << 10, max_model_len=150, preemption=preemption)
        assert tight.cache.spec.num_pages < sum(out.outputs[0].kv.pages for out in together)
        assert [out.outputs[0].token_ids for out in tight.generate(prompts, params)] == alone
        assert tight.cache.free_pages == tight.cache.spec.num_pages


def test_only_the_reference_kernels_serve_it() -> None:
    model = tiny_model(head_dim=32)
    assert tiny_llm("kivi", model=model, kernels="auto").cache.kernels is reference
    with pytest.raises(FormatError, match="do not serve k2v2t"):
        tiny_llm("kivi", model=model, kernels="numba")
    with pytest.raises(PolicyError, match="2 or 4"):
        parse_policy("kivi:3")
