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


@pytest.mark.parametrize(
    "setting",
    [
        "",
        "metric=rkv",
        "metric=snapkv",
        "metric=accumulated,queries=0",
        "select=topk,budget=20",
        "format=k8v4,group=max",
    ],
)
def test_padded_prompts_keep_what_they_would_keep_alone(setting: str) -> None:
    base = {"p": "0.5", "window": "6", "sinks": "2", "lower": "10", "upper": "30", "queries": "8"}
    base |= dict(x.split("=") for x in setting.split(",") if x)
    kv = "hardkv:" + ",".join(f"{name}={value}" for name, value in base.items())
    lengths = (40, 33, 28, 52, 9, 90, 50)  # 28 is not selected from, 9 and what follows stand for themselves
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(sum(lengths), h, 16, generator=generator) * 2 for h in (4, 2, 2))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    found = []
    for together in (True, False):
        cache, bound = small_cache([kv] * len(lengths), max_slots=len(lengths), layers=1, max_window=64)
        if together:
            cache.kernels = deferring()
        slots = [cache.admit(p.rule) for p in bound]
        chunks = [PromptChunk(*x) for x in zip(slots, starts, lengths, bound, strict=True)]
        attention = PrefillAttention(cache, chunks)
        assert [len(g.prompts) for g in attention._groups] == ([4, 1, 2] if together else [1] * 7)
        attention(0, q, k, v)
        assert cache.finish_prompts(slots, list(lengths)) == [None] * len(lengths)
        cache.check_integrity()
        found.append([cache.tokens(0, slot) for slot in slots])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.position, theirs.position)
        assert torch.equal(ours.tier, theirs.tier)
        torch.testing.assert_close(ours.k, theirs.k)
    held = [int((t.position >= 0).sum()) for t in found[0]]
    assert held[2] == 2 * 28
    assert held[5] < 2 * 90


def test_a_batch_says_where_each_prompt_stands() -> None:
    measured = [sampled_rows(5, 1), None, sampled_rows(3, 1)]
    batch = PromptBatch.of([4, 2, 7], [5, 2, 3], [(1, 3), (1, 1), (0, 2)], measured, torch.device("cpu"))
    assert batch.table.tolist() == [[4, 0, 5, 0, 5, 1, 3, 0], [2, 5, 2, 5, 0, 1, 1, 0], [7, 7, 3, 5, 3, 0, 2, 0]]
    assert batch.bounds.tolist() == [0, 5, 7, 10]
    assert batch.measured(1)[0].tolist() == []
    assert batch.measured(2)[0].tolist() == [0, 1, 2]
    assert batch.tokens == 10
