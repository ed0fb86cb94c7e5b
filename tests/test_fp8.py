"""The format `fp8`: e4m3 with a scale of 1, the baseline of other engines."""

from __future__ import annotations

import pytest
import torch

from siftkv import SamplingParams, parse_policy
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.errors import FormatError
from siftkv.formats import PageLayout, Tier, TierFormat
from siftkv.kernels import numba, reference
from siftkv.kernels.reference.quantize import decode, encode
from tests.tiny import prompt, tiny_llm


def test_tokens_come_back_as_e4m3_and_large_numbers_saturate() -> None:
    layout = PageLayout(Tier(TierFormat.parse("fp8")), 16, 1024)
    k, v = torch.randn(2, 5, 16) * 20
    k[0, 0], k[1, 1] = 1e4, -1e4
    position = torch.arange(5)
    found_k, found_v, _, found_position = decode(layout, encode(layout, k, v, torch.zeros(5), position))
    assert torch.equal(found_k, k.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert torch.equal(found_v, v.to(torch.float8_e4m3fn).float())
    assert torch.equal(found_position, position)
    assert layout.key_row == layout.value_row == 16


def test_it_stays_close_to_the_full_cache() -> None:
    llm = tiny_llm("uniform:fp8,window=8", kernels="auto", formats=["bf16"], check_integrity=True)
    assert llm.cache.kernels is reference
    rows = [ForcedRow(prompt(90), prompt(40, 1), parse_policy(kv)) for kv in ("uniform:fp8,window=8", "full")]
    run = ForcedRun(llm.engine, rows)
    fp8, full = torch.stack([logits.log_softmax(-1) for logits in run], 1)
    kl = float((full.exp() * (full - fp8)).sum(-1).mean())
    assert 1e-9 < kl < 2e-2
    assert run.reports[0].tokens_by_tier["fp8"] > run.reports[1].tokens_by_tier["fp8"] == 0
    llm.generate(
        [prompt(30)] * 3, SamplingParams(temperature=0, max_tokens=12), ["uniform:fp8,window=8", "full", "full"]
    )
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_other_kernels_refuse_it() -> None:
    with pytest.raises(FormatError, match="do not serve fp8"):
        tiny_llm("uniform:fp8", kernels="numba")
    assert tiny_llm("uniform:k8v4", kernels="auto").cache.kernels is numba
