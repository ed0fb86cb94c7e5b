"""Prompts that are measured, classed and stored together keep what each would keep alone."""

from types import SimpleNamespace

import pytest
import torch

from siftkv.attention import PrefillAttention, PromptChunk
from siftkv.kernels import reference
from siftkv.kernels.prompts import PromptBatch
from siftkv.policies import Fixed
from siftkv.policies.importance import sampled_rows
from tests.tiny import small_cache

LENGTHS = (40, 40, 7, 40, 55, 1)
KV = (0, 0, 0, 1, 1, 2)


def deferring() -> SimpleNamespace:
    """The reference as kernels that find faults later: prompts then go through it together."""
    bodies = {name: getattr(reference, name) for name in reference.__all__}
    return SimpleNamespace(**bodies | {"DEFERS_FAULTS": True, "refused_layers": lambda s: torch.zeros(len(s.seen))})


@pytest.mark.parametrize("together", [True, False])
def test_prompts_keep_what_they_would_keep_alone(together: bool) -> None:
    kv = ["diffkv:alpha_high=2,alpha_low=0.4,window=6", Fixed(0.3, 0.4, window=6, high="k8v4"), "uniform:k4v2"]
    policies = [kv[i] for i in KV]
    generator = torch.Generator().manual_seed(3)
    tokens = sum(LENGTHS)
    q, k, v = (torch.randn(tokens, h, 16, generator=generator) for h in (4, 2, 2))
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]

    cache, bound = small_cache(policies, max_slots=len(LENGTHS), layers=1, max_window=64)
    if together:
        cache.kernels = deferring()
    slots = [cache.admit(p.rule) for p in bound]
    chunks = [PromptChunk(*x) for x in zip(slots, starts, LENGTHS, bound, strict=True)]
    out = PrefillAttention(cache, chunks)(0, q, k, v)
    assert cache.finish_prompts(slots, list(LENGTHS)) == [None] * len(LENGTHS)
    cache.check_integrity()

    alone, same = small_cache(policies, max_slots=len(LENGTHS), layers=1, max_window=64)
    for policy, start, length in zip(same, starts, LENGTHS, strict=True):
        span = slice(start, start + length)
        slot = alone.admit(policy.rule)
        one = PrefillAttention(alone, [PromptChunk(slot, 0, length, policy)])(0, q[span], k[span], v[span])
        torch.testing.assert_close(out[span], one)
        assert alone.finish_prompt(slot, length) is None
    assert torch.equal(cache.state.lengths, alone.state.lengths)
    assert torch.equal(cache.state.window_k, alone.state.window_k)
    torch.testing.assert_close(cache.state.window_score, alone.state.window_score)
    for name in ("seen", "window_start", "peak_pages"):
        assert torch.equal(getattr(cache.state, name), getattr(alone.state, name)), name


def test_a_batch_says_where_each_prompt_stands() -> None:
    measured = [sampled_rows(5, 1), None, sampled_rows(3, 1)]
    batch = PromptBatch.of([4, 2, 7], [5, 2, 3], [(1, 3), (1, 1), (0, 2)], measured, torch.device("cpu"))
    assert batch.table.tolist() == [[4, 0, 5, 0, 5, 1, 3, 0], [2, 5, 2, 5, 0, 1, 1, 0], [7, 7, 3, 5, 3, 0, 2, 0]]
    assert batch.bounds.tolist() == [0, 5, 7, 10]
    assert batch.measured(1)[0].tolist() == []
    assert batch.measured(2)[0].tolist() == [0, 1, 2]
    assert batch.tokens == 10
