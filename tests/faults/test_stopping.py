"""A user who stops a step in the middle, as Ctrl-C does: requests that it may have left half changed end."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from siftkv.cache import KVCache, compaction, swap
from siftkv.engine import delivery
from siftkv.engine.detokenizer import IncrementalDetokenizer
from siftkv.engine.runner import Runner
from siftkv.errors import StepFailed
from siftkv.kernels.reference import pages
from tests.faults.helpers import first_time
from tests.hardkv.requests import KV, greedy, llm_of, tight
from tests.test_pipeline import EagerGraphs
from tests.tiny import prompt

PROMPTS = [prompt(40), prompt(25), prompt(50), prompt(33)]


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (compaction, "return_pages"),  # which are in a table still
        (pages, "return_pages"),
        (KVCache, "admit"),
        (Runner, "prefill"),
        (KVCache, "attend"),
        (swap, "_to_host"),
        (IncrementalDetokenizer, "append"),
        (delivery, "report_of"),
    ],
)
def test_the_next_requests_find_a_whole_cache(
    owner: Any, name: str, overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    pool = tight(llm_of(KV), 30) if owner is swap else 6 << 20
    llm = llm_of(KV, check_integrity=False, kv_cache_memory_bytes=pool)
    if overlapping:
        llm.engine.runner.graphs = EagerGraphs(llm)  # type: ignore[assignment]
    expected = [o.token_ids for o in llm.generate(PROMPTS, greedy(60))]
    with monkeypatch.context() as stopped:
        stopped.setattr(owner, name, first_time(getattr(owner, name), KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(60))
    llm.cache.check_integrity()
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert sorted(llm.cache._free_slots) == list(range(llm.cache.spec.max_slots))
    assert [o.token_ids for o in llm.generate(PROMPTS, greedy(60))] == expected


def test_a_stream_beside_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = llm_of(KV)
    stream = llm.stream(prompt(40), greedy(60))
    next(stream)
    with monkeypatch.context() as stopped:
        stopped.setattr(KVCache, "attend", first_time(KVCache.attend, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(60))
    with pytest.raises(StepFailed, match="a step was stopped: KeyboardInterrupt"):
        list(stream)
