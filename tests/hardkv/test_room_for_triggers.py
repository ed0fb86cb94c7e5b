"""Triggers in a pool that is nearly full: they take no page that a step beside them was to have."""

from __future__ import annotations

import random

import pytest
from torch import Tensor

from siftkv import SamplingParams, parse_policy
from siftkv.cache import KVCache
from siftkv.errors import OutOfPages
from tests.hardkv.requests import tight
from tests.test_pipeline import EagerGraphs
from tests.tiny import prompt, tiny_llm


def short_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens found no page, a step."""
    short, step = [], KVCache.step

    def counted(cache: KVCache, slots: Tensor) -> Tensor:
        done = step(cache, slots)
        short.append(int((~done).sum()))
        return done

    monkeypatch.setattr(KVCache, "step", counted)
    return short


@pytest.mark.parametrize(("interval", "p", "preemption"), [(2, 0.99, "swap"), (1, 1, "recompute")])
def test_a_step_beside_triggers_finds_its_pages(
    interval: int, p: float, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = f"hardkv:p={p},window=4,sinks=1,lower=4,upper=8,interval={interval},queries=4,format=k8v4"
    sizes = {"max_num_seqs": 4, "max_model_len": 400, "max_window": 4, "sink_rows": 1}
    llm = tiny_llm(kv, kv_cache_memory_bytes=140_000, preemption=preemption, check_integrity=True, **sizes)
    short = short_steps(monkeypatch)
    for i, length in enumerate((50, 12, 33, 58)):
        params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        llm.engine.add(prompt(length, i), params, parse_policy(kv))
    sequences = [s for i in range(4) for s in llm.engine.sequences(f"request-{i}")]
    while llm.engine.has_work:
        llm.engine.step()
    assert sum(s.preemptions for s in sequences) > 0, "the pool was never full"
    assert sum(short) == 0
    assert [len(s.output_ids) for s in sequences] == [120] * 4


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("seed", [13, 34, 35])
def test_no_token_ever_waits_in_its_window(seed: int, overlapping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a trigger takes of a pool, the step after it finds its pages, or the request that had all of them ends.
    A token that waited would wait for its request's whole life, and the eighth overwrite another's row of the ring.
    """
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    draw = random.Random(seed)
    settings = {"p": draw.choice([0.5, 0.9, 0.99, 1]), "interval": draw.choice([1, 1, 2, 3, 5])}
    settings |= {"upper": draw.choice([8, 16, 24]), "lower": draw.choice([4, 8])}
    merged = draw.choice([",format=k8v4", "", ",format=k8v4,condense=merge,metric=rkv"])
    kv = "hardkv:window=4,sinks=1,queries=4," + ",".join(f"{k}={v}" for k, v in settings.items()) + merged
    sizes = {"max_num_seqs": draw.choice([1, 1, 2, 3]), "max_model_len": 300, "max_window": 4, "sink_rows": 1}
    pages, preemption = draw.randint(4, 24), draw.choice(["swap", "recompute"])
    memory = tight(tiny_llm(kv, **sizes), pages)
    llm = tiny_llm(kv, kv_cache_memory_bytes=memory, preemption=preemption, **sizes)
    if overlapping:
        llm.engine.runner.graphs = EagerGraphs(llm)  # type: ignore[assignment]
    short = short_steps(monkeypatch)
    for i in range(sizes["max_num_seqs"]):
        params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
        llm.engine.add(prompt(draw.randint(2, 40), seed * 10 + i), params, parse_policy(kv))
    sequences = [s for i in range(sizes["max_num_seqs"]) for s in llm.engine.sequences(f"request-{i}")]
    while llm.engine.has_work:
        llm.engine.step()
    assert sum(short) == 0
    assert any(isinstance(s.error, OutOfPages) for s in sequences), "the pool was never full"
    assert all(s.error is None or "pool of" in str(s.error) for s in sequences)
