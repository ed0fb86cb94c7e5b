"""The drift benchmark on a tiny model: merging stays closer to the full cache than eviction."""

from __future__ import annotations

import json
from pathlib import Path

from siftkv.benchmarks import drift
from tests.tiny import prompt, tiny_llm


def test_merging_drifts_less_than_eviction(tmp_path: Path) -> None:
    kinds = drift.policies(80, 8)
    llm = tiny_llm(kinds[-1], max_num_seqs=3, kv_cache_memory_bytes=12 << 20, max_model_len=400)
    found = drift.measure(llm, prompt(230), 150, kinds, lambda: None)
    assert len(found["evict"].position) == len(found["merge"].position) >= 10
    for name in ("absolute", "kl"):
        evict, merge = (getattr(found[kind], name)[5:] for kind in drift.KINDS)
        assert sum(merge) < 0.6 * sum(evict)
    assert all(x < 0 for x in found["evict"].signed[1:])
    assert len(drift.to_rows(found)) == 4
    json.dumps(drift.to_data(found, {}), allow_nan=False)
    drift.plot(found, str(tmp_path / "drift.png"), "title")
    assert (tmp_path / "drift.png").stat().st_size > 0
    assert llm.cache.free_pages == llm.cache.spec.num_pages
