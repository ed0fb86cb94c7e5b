"""The ring of recent queries: written by prompts and decode steps, kept by swapping, counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from siftkv.attention import PrefillAttention, PromptChunk
from siftkv.cache import KVCache
from siftkv.engine.sizing import planned_bytes
from tests.compaction_helpers import (
    DIM,
    GROUP,
    HEADS,
    LAYERS,
    Cascade,
    opened,
)
from tests.tiny import random_step, small_cache


@pytest.fixture(params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check_queries(cache: KVCache, slot: int, history: Tensor) -> None:
    seen = history.shape[1]
    for layer in range(LAYERS):
        q, position = cache.queries(layer, slot)
        assert position.tolist() == list(range(max(0, seen - 8), seen))
        assert torch.equal(q, history[layer, position])


@pytest.mark.parametrize("length", [3, 8, 29])
def test_the_ring_holds_the_last_queries(length: int, kernels: str) -> None:
    cache, policy, _, generator = opened(5, kernels=kernels)
    slot = cache.admit(policy.rule)
    history = torch.randn(LAYERS, length, HEADS * GROUP, DIM, generator=generator)
    for layer in range(LAYERS):
        k = torch.randn(length, HEADS, DIM, generator=generator)
        cache.store_prompt(layer, slot, k, k, torch.zeros(HEADS, length), torch.zeros(HEADS, length, dtype=torch.int8))
        cache.store_queries(layer, cache.ring_places([(slot, 0, length)]), history[layer])
    cache.finish_prompt(slot, length)
    for _ in range(4):
        check_queries(cache, slot, history)
        new = torch.stack([q for q, *_ in random_step(cache, [slot], generator)])
        history = torch.cat([history, new], 1)
    slot = cache.swap_in(cache.swap_out(slot))
    check_queries(cache, slot, history)


def test_prompts_of_a_batch_leave_their_queries() -> None:
    cache, policy, _, generator = opened(5)
    lengths = (30, 3, 11)
    chunks, start = [], 0
    for length in lengths:
        chunks.append(PromptChunk(cache.admit(policy.rule), start, length, policy))
        start += length
    attention = PrefillAttention(cache, chunks)
    q = torch.randn(LAYERS, start, HEADS * GROUP, DIM, generator=generator)
    for layer in range(LAYERS):
        attention(layer, q[layer], *(torch.randn(start, HEADS, DIM, generator=generator) for _ in range(2)))
    for chunk in chunks:
        cache.finish_prompt(chunk.slot, chunk.length)
        check_queries(cache, chunk.slot, q[:, chunk.start : chunk.start + chunk.length])


def test_rings_keep_the_models_type() -> None:
    cache, _, slot, generator = opened(20, dtype=torch.bfloat16)
    random_step(cache, [slot], generator)
    q, _ = cache.queries(0, slot)
    assert cache.state.queries.dtype == torch.bfloat16
    assert torch.equal(q, q.bfloat16().float())


def test_planned_bytes_count_rings_and_flags() -> None:
    for skips in (False, True):
        cache, _ = small_cache([Cascade(query_rows=5, skips=skips)])
        assert planned_bytes(cache.spec, cache.state.conditioning) == cache.usage().allocated
    plain, _ = small_cache([Cascade(query_rows=0)])
    rings = cache.spec.all_slots * LAYERS * 5 * HEADS * GROUP * DIM * 4
    assert cache.usage().allocated - plain.usage().allocated == rings
