"""Triggers in a pool that is nearly full: they take no page that a step beside them was to have."""

from __future__ import annotations

import pytest
from torch import Tensor

from siftkv import SamplingParams, parse_policy
from siftkv.cache import KVCache
from tests.tiny import prompt, tiny_llm


@pytest.mark.parametrize(("interval", "p", "preemption"), [(2, 0.99, "swap"), (1, 1, "recompute")])
def test_a_step_beside_triggers_finds_its_pages(
    interval: int, p: float, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = f"hardkv:p={p},window=4,sinks=1,lower=4,upper=8,interval={interval},queries=4,format=k8v4"
    sizes = {"max_num_seqs": 4, "max_model_len": 400, "max_window": 4, "sink_rows": 1}
    llm = tiny_llm(kv, kv_cache_memory_bytes=140_000, preemption=preemption, check_integrity=True, **sizes)
    short, step = [], KVCache.step

    def counted(cache: KVCache, slots: Tensor) -> Tensor:
        done = step(cache, slots)
        short.append(int((~done).sum()) if len(slots) > 1 else 0)
        return done

    monkeypatch.setattr(KVCache, "step", counted)
    for i, length in enumerate((50, 12, 33, 58)):
        params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        llm.engine.add(prompt(length, i), params, parse_policy(kv))
    sequences = [s for i in range(4) for s in llm.engine.sequences(f"request-{i}")]
    while llm.engine.has_work:
        llm.engine.step()
    assert sum(s.preemptions for s in sequences) > 0, "the pool was never full"
    assert sum(short) == 0
    assert [len(s.output_ids) for s in sequences] == [120] * 4
