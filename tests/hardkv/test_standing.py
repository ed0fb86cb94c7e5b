"""Requests that benchmarks put into a cache's tensors are like any others."""

from __future__ import annotations

import pytest
import torch

from siftkv.benchmarks.standing import stand
from tests.tiny import tiny_llm, tiny_model


@pytest.mark.parametrize("kv", ["hardkv:queries=4", "fixed"])
def test_requests_stand_with_the_tokens_that_were_asked_for(kv: str) -> None:
    llm = tiny_llm(kv, model=tiny_model(dtype=torch.bfloat16), max_num_seqs=3, kv_cache_memory_bytes=6 << 20)
    cache, tiers = llm.cache, len(llm.cache.spec.tiers)
    lengths = torch.randint(0, 110, (3, 2, 2, tiers), generator=torch.Generator().manual_seed(0))
    slots = stand(llm, llm.kv, lengths, torch.tensor([300, 310, 330]))
    cache.check_integrity()
    for own, slot in zip(lengths, slots, strict=True):
        for layer in range(2):
            tokens = cache.tokens(layer, slot)
            for tier in range(tiers):
                assert torch.equal((tokens.tier == tier).sum(-1), own[layer, :, tier])
            assert (tokens.position.diff(dim=-1)[tokens.tier[:, 1:] != -1] >= (tiers == 1)).all()
            assert bool(tokens.k.isfinite().all())
            assert int(tokens.votes.max()) == 0
    cache.release(slots)
    assert cache.free_pages == cache.spec.num_pages
