"""One error at one of many places, in traffic of several policies: whoever it does not end gets the same tokens."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from siftkv import LLM
from siftkv.cache import KVCache, compaction, swap
from siftkv.cache.rules import SlotRule
from siftkv.engine import delivery
from siftkv.engine.binding import BoundPolicy
from siftkv.engine.cascade import Cascade
from siftkv.engine.delivery import Delivery
from siftkv.engine.detokenizer import IncrementalDetokenizer, StopChecker
from siftkv.engine.flights import Flights
from siftkv.engine.forecast import Forecast
from siftkv.engine.graphs import decode_step
from siftkv.engine.runner import Runner
from siftkv.engine.sampler import Sampler
from siftkv.engine.sampling_params import SamplingParams
from siftkv.engine.scheduler import Scheduler
from siftkv.engine.sequence import Sequence
from siftkv.kernels.reference import pages
from siftkv.policies import parse_policy
from siftkv.policies.hardkv import HardKV
from tests.hardkv.layerwise import FakeLane, LayerwiseKernels
from tests.hardkv.requests import KV, llm_of, tight
from tests.test_pipeline import EagerGraphs
from tests.tiny import prompt

POLICIES = [
    KV,
    "diffkv:window=8,sinks=2",
    "full:window=8",
    "sift:window=8,sinks=2,observe=8,top=k8v4,high=k4v4,low=k4v2",
]
ITS_OWN = [
    (BoundPolicy, "sift"),
    *((Cascade, name) for name in ("due", "moves", "settle", "run")),
    (HardKV, "vote"),
    *((KVCache, name) for name in ("admit", "store_prompt", "finish_prompts", "rewrite", "swap_out", "swap_in")),
    (SlotRule, "write"),
    (pages, "return_pages"),
    (compaction, "return_pages"),
    (swap, "take_pages"),
    *((IncrementalDetokenizer, name) for name in ("append", "flush")),
    (StopChecker, "close"),
    (Sampler, "sample"),
    *((delivery, name) for name in ("read_counts", "report_of")),
    *((Delivery, name) for name in ("append", "foresee")),
    (Sequence, "output"),
    *((Forecast, name) for name in ("learn_pages", "learn_output", "_share")),
    *((Scheduler, name) for name in ("_preempt", "remove")),
    (Runner, "prefill"),
]
"""Where an error ends one request at most."""
OF_ALL = [
    *((KVCache, name) for name in ("attend", "step", "step_page_bound")),
    *((Scheduler, name) for name in ("schedule", "wants_turn")),
    *((Flights, name) for name in ("launch", "may_start")),
    (Runner, "decode"),
]
"""Where it ends all that run, and the first of those that wait."""
PLACES = ITS_OWN + OF_ALL
SLOTS, PAGES = 4, 36
FORMATS = ["fp32", "k8v4", "k4v4", "k4v2"]


class Graphs(EagerGraphs):
    """Also for requests that wait for their tokens."""

    @torch.inference_mode()
    def run(self, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        return decode_step(self.decoder, self.cache, tokens, slots), self.cache.finite(slots)


def requests() -> list[tuple[str, list[int], str, SamplingParams]]:
    drawn = random.Random(0)
    return [
        (
            f"r{n}",
            prompt(drawn.randint(20, 40), n),
            POLICIES[n % len(POLICIES)],
            SamplingParams(temperature=0.8 * (n == 2), seed=n, max_tokens=drawn.randint(12, 30), stop=("t5 t5",)),
        )
        for n in range(6)
    ]


def run(overlapping: bool) -> tuple[dict[str, Sequence], dict[str, list[int]], LLM]:
    """All to their end, in a pool that is short: sequences, and the tokens that their chunks had."""
    llm = llm_of(KV, formats=FORMATS, kv_cache_memory_bytes=_memory(), max_window=16, max_num_seqs=SLOTS)
    if overlapping:
        llm.engine.runner.graphs = Graphs(llm)  # type: ignore[assignment]
        llm.cache.kernels = LayerwiseKernels()
        llm.cache.state.scratch["selections"] = FakeLane(late=False)
    told: dict[str, list[int]] = defaultdict(list)
    for name, ids, kv, params in requests():
        llm.engine.add(ids, params, parse_policy(kv), request_id=name)
    sequences = {name: llm.engine.sequences(name)[0] for name, *_ in requests()}
    while llm.engine.has_work:
        for chunk in llm.engine.step():
            told[chunk.request_id] += chunk.token_ids
    return sequences, told, llm


@cache
def _memory() -> int:
    return tight(llm_of(KV, formats=FORMATS, max_window=16, max_num_seqs=SLOTS), PAGES)


@cache
def undisturbed(overlapping: bool) -> tuple[dict[str, list[int]], Counter[str]]:
    """Everybody's tokens, and how often each place is passed."""
    passed: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", lambda x: x)
        for owner, name in PLACES:
            patch.setattr(owner, name, _counted(getattr(owner, name), passed, _place(owner, name)))
        sequences, _, _ = run(overlapping)
    assert all(s.error is None for s in sequences.values())
    return {name: s.output_ids for name, s in sequences.items()}, passed


def _counted(real: Callable[..., Any], passed: Counter[str], place: str) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        passed[place] += 1
        return real(*args, **kwargs)

    return called


def _raising(real: Callable[..., Any], at: int) -> Callable[..., Any]:
    left = [at]

    def called(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyError("of nobody's making")
        return real(*args, **kwargs)

    return called


def _place(owner: Any, name: str) -> str:
    return f"{owner.__name__.rpartition('.')[2]}.{name}"


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[_place(*x) for x in PLACES])
def test_whom_an_error_does_not_end_gets_the_same_tokens(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    place = PLACES.index((owner, name))
    ways = [way for way in (False, True) if undisturbed(way)[1][_place(owner, name)]]
    overlapping = ways[place % len(ways)]
    expected, passed = undisturbed(overlapping)
    monkeypatch.setattr(owner, name, _raising(getattr(owner, name), (passed[_place(owner, name)] + 1) // 2))
    sequences, told, llm = run(overlapping)
    for request, sequence in sequences.items():
        whole = expected[request]
        assert told[request] == sequence.output_ids
        assert sequence.output_ids == (whole if sequence.error is None else whole[: len(sequence.output_ids)])
    assert sum(s.error is not None for s in sequences.values()) <= (1 if place < len(ITS_OWN) else SLOTS + 1)
    llm.cache.check_integrity()
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert llm.cache.free_slots == llm.cache.spec.max_slots
