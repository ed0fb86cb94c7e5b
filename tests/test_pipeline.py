"""Steps are launched ahead only while pages last for sure."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from siftkv import LLM
from siftkv.engine.graphs import decode_step
from siftkv.engine.pipeline import Flight
from siftkv.engine.sampling_params import SamplingParams
from siftkv.engine.sequence import Sequence
from siftkv.kernels.reference.pages import most_taken
from tests.tiny import prompt, tiny_llm

KV = [
    "full:window=8",
    "diffkv:window=8,sinks=2",
    "diffkv:window=8,sinks=2,alpha_high=1.1,alpha_low=0.8,catch_up=1",
    "fixed:high_share=0.2,low_share=0.3,length=400,window=8,sinks=2",
]


@pytest.mark.parametrize("kv", KV)
def test_two_steps_take_no_more_pages_than_told(kv: str) -> None:
    llm = tiny_llm(kv, max_window=8)
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    for length in (30, 41, 60):
        llm.engine.add(prompt(length, seed=length), params, llm.kv)
    llm.engine.step()
    running = list(llm.engine.scheduler.running)
    slots = torch.tensor([s.slot for s in running])
    held, told = [], []
    for _ in range(140):
        held.append(int(llm.cache.pages_held(slots).sum()))
        told.append(int(most_taken(llm.cache.state, slots, 2)))
        llm.engine.step()
    grown = [after - before for before, after in zip(held, held[2:], strict=False)]
    assert all(pages <= most for pages, most in zip(grown, told, strict=False))
    assert any(grown)
    assert sum(told) < 0.7 * len(told) * 2 * len(running) * llm.cache.spec.head_slots


def test_what_a_budget_does_not_allow_is_not_kept_free() -> None:
    """Tiers of `sift` end with full pages, and open the next ones much later: one by one, as the request grows."""
    llm = tiny_llm("sift:0.5,window=8,sinks=2", max_model_len=500, max_window=8)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for length in (300, 341, 380):
        llm.engine.add(prompt(length, seed=length), params, llm.kv)
    llm.engine.step()
    slots = torch.tensor([s.slot for s in llm.engine.scheduler.running])
    held, told = [], []
    for _ in range(50):
        held.append(int(llm.cache.pages_held(slots).sum()))
        told.append(llm.cache.step_page_bound(slots))
        llm.engine.step()
    grown = [after - before for before, after in pairwise(held)]
    assert all(pages <= most for pages, most in zip(grown, told, strict=False))
    assert 0 < sum(told) <= 2 * sum(grown)


class EagerGraphs:
    """Stands in for captured graphs: a step is computed at once, and its landing waits for nothing."""

    def __init__(self, llm: LLM) -> None:
        self.decoder, self.cache = llm.model.decoder, llm.cache
        self.launches: list[bool] = []

    @torch.inference_mode()
    def launch(self, tokens: Tensor, slots: Tensor, looks_ahead: bool = False) -> SimpleNamespace:
        self.launches.append(looks_ahead)
        logits = decode_step(self.decoder, self.cache, tokens, slots)
        ahead = int(most_taken(self.cache.state, slots, 2)) if looks_ahead else None
        found = logits.argmax(-1)
        landed = found.tolist(), self.cache.finite(slots).tolist(), self.cache.free_pages, ahead
        return SimpleNamespace(tokens=found, wait=lambda: landed)


def tight_memory(pages: int) -> int:
    cache = tiny_llm("full:window=8", max_window=8).cache
    return cache.usage().allocated + (pages - cache.spec.num_pages) * (cache.spec.page_bytes + 4)


def finish(llm: LLM, params: SamplingParams) -> tuple[list[tuple[list[int], object]], int]:
    """Tokens and reports of requests in a tight pool, and how often they were preempted."""
    ids = [llm.engine.add(prompt(30 + n, seed=n), params, llm.kv) for n in range(4)]
    while llm.engine.has_work:
        llm.engine.step()
    sequences = [llm.engine.sequences(i)[0] for i in ids]
    assert all(s.error is None for s in sequences)
    return [(s.output_ids, s.kv and s.kv.per_head_tokens) for s in sequences], sum(s.preemptions for s in sequences)


def test_overlapping_steps_in_a_tight_pool_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    plain, overlapping = (tiny_llm("full:window=8", max_window=8, kv_cache_memory_bytes=tight_memory(40)) for _ in "ab")
    engine, graphs, alone = overlapping.engine, EagerGraphs(overlapping), []
    engine.runner.graphs = graphs  # type: ignore[assignment]
    launch = engine.flights.launch

    def counted(sequences: list[Sequence], before: Flight | None) -> Flight:
        alone.extend([sequences] if before is None else [])
        return launch(sequences, before)

    monkeypatch.setattr(engine.flights, "launch", counted)
    (expected, preempted), (found, again) = (finish(llm, params) for llm in (plain, overlapping))
    assert min(preempted, again) > 0, "the pool was meant to run out"
    assert found == expected
    assert sum(graphs.launches) > 20, "pages were meant to be short"
    assert len(alone) < 0.2 * len(graphs.launches), "most steps overlap nevertheless"


def test_who_was_refused_does_not_break_off_the_next_step() -> None:
    """What the next step may take is not free for a prompt: steps that overlap must know that, too."""
    llm = tiny_llm("full:window=8", max_window=8, kv_cache_memory_bytes=tight_memory(40))
    scheduler, asked = llm.engine.scheduler, []
    for n in range(12):
        params = SamplingParams(temperature=0, max_tokens=20 + 9 * n % 50, ignore_eos=True)
        llm.engine.add(prompt(20 + n, seed=n), params, llm.kv)
    while llm.engine.has_work:
        batch = scheduler.schedule()
        if batch.decode and scheduler.waiting and scheduler.cache.free_slots and not scheduler.swapped:
            asked.append(scheduler.wants_turn(llm.cache.free_pages))
        chosen = [batch]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "schedule", chosen.pop)
            llm.engine.step()
    assert len(asked) > 20
    assert not any(asked)


@pytest.mark.parametrize("kv", ["full:window=8", "hardkv:p=0.9,window=8,queries=8,interval=64,lower=16,upper=24"])
def test_who_fits_is_not_kept_waiting_by_what_an_earlier_step_might_have_taken(
    kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps begin to overlap when triggers are due, or when every last page is full: soon afterwards neither is so."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    cache = tiny_llm(kv, max_window=8, max_num_seqs=8, max_model_len=400).cache
    full = kv.startswith("full")
    page, pages = cache.spec.layouts[0].tokens, 36 if full else 132
    memory = cache.usage().allocated + (pages - cache.spec.num_pages) * (cache.spec.page_bytes + 4)
    llm = tiny_llm(kv, max_window=8, max_num_seqs=8, max_model_len=400, kv_cache_memory_bytes=memory)
    engine, steps = llm.engine, 0
    engine.runner.graphs = EagerGraphs(llm)  # type: ignore[assignment]
    for n in range(4 if full else 6):
        params = SamplingParams(temperature=0, max_tokens=6 if full and n == 0 else 250, ignore_eos=True)
        engine.add(prompt(8 + page if full else 60, seed=n), params, llm.kv)
    for _ in range(1 if full else 3):
        engine.step()
    late = engine.add(
        prompt(8 + 2 * page if full else 60, seed=9),
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        llm.kv,
    )
    while engine.sequences(late)[0].slot < 0 and engine.sequences(late)[0].finish_reason is None:
        engine.step()
        steps += 1
    assert steps <= 20
    llm.cache.check_integrity()
