"""The memory manager's benchmark on a small trace: both sides end where they should, and the command needs a GPU."""

from __future__ import annotations

import pytest
import torch

from siftkv.benchmarks import manager
from siftkv.errors import SiftKVError

SMALL = manager.Trace(requests=3, prompt=150, steps=5, layers=2, kv_heads=2, head_dim=64)


def test_a_trace_is_played_and_leaves_the_cache_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    from siftkv.kernels import reference

    monkeypatch.setattr(manager, "get_kernels", lambda *_: reference)
    cache = manager.open_cache(SMALL, "cpu")
    row = manager.play(cache, SMALL)
    tokens = SMALL.requests * SMALL.layers * SMALL.kv_heads * SMALL.prompt
    assert 0.3 * tokens < row.tokens < tokens
    assert row.pages >= SMALL.requests * SMALL.layers * SMALL.kv_heads
    assert cache.free_pages == cache.spec.num_pages
    assert min(row.prompt_ms, row.step_ms, row.release_ms) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_it_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(SiftKVError, match="CUDA device"):
        manager.run_manager(SMALL)
