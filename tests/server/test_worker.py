"""The engine's thread by itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from siftkv import LLM, SamplingParams
from siftkv.engine.outputs import CompletionOutput
from siftkv.errors import RequestError, StepFailed
from siftkv.server.errors import EngineDied, QueueFull, Unavailable, api_error
from siftkv.server.generation import ClientGone, Generation, GenerationRequest
from siftkv.server.worker import EngineWorker
from tests.server.live import byte_llm, wait_for
from tests.tiny import prompt


@pytest.fixture
def llm() -> LLM:
    return byte_llm(max_num_seqs=4)


@pytest.fixture
def worker(llm: LLM) -> Iterator[EngineWorker]:
    made = EngineWorker(llm, max_queue=8).start()
    wait_for(lambda: made.state == "ready")
    yield made
    made.stop()
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert not llm.engine._live


def request(llm: LLM, tokens: int = 5, n: int = 1, seed: int = 0, **settings: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=tokens, n=n, ignore_eos=True, **({"temperature": 0} | settings))
    return GenerationRequest(prompt(6, seed), params, llm.kv)


async def outputs(generation: Generation) -> dict[tuple[int, int], CompletionOutput]:
    return {(p, c.index): c.output async for batch in generation.batches() for p, c in batch if c.output is not None}


def run(task: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(task(), 30))


def test_requests_of_one_generation_end_as_alone(worker: EngineWorker, llm: LLM) -> None:
    requests = [request(llm, seed=1), request(llm, 7, n=2, seed=2, temperature=1.0)]
    requests[1] = GenerationRequest(requests[1].prompt_ids, SamplingParams(max_tokens=7, n=2, seed=3), llm.kv)

    async def task() -> Any:
        return await outputs(await worker.submit(requests, "x"))

    found = run(task)
    alone = byte_llm()
    for place, asked in enumerate(requests):
        expected = alone.generate([asked.prompt_ids], asked.params)[0].outputs
        assert [found[place, i].token_ids for i in range(asked.params.n)] == [o.token_ids for o in expected]


def test_a_generation_is_taken_whole_or_not_at_all(worker: EngineWorker, llm: LLM) -> None:
    wrong = GenerationRequest([5000], SamplingParams(), llm.kv)

    async def task() -> None:
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await worker.submit([request(llm), wrong], "x")

    run(task)
    assert worker.in_system == 0


def test_cancelling_frees_pages_before_the_next_step(worker: EngineWorker, llm: LLM) -> None:
    async def task() -> int:
        generation = await worker.submit([request(llm, 1000)], "x")
        async for _ in generation.batches():
            generation.client_gone()
            break
        with pytest.raises(ClientGone):
            await outputs(generation)
        return await worker.call(lambda llm: llm.cache.spec.num_pages - llm.cache.free_pages)

    assert run(task) == 0
    assert worker.in_system == 0


def test_a_task_that_is_cancelled_while_it_submits_leaves_nothing(worker: EngineWorker, llm: LLM) -> None:
    async def task() -> None:
        submitting = asyncio.create_task(worker.submit([request(llm, 1000)], "x"))
        await asyncio.sleep(0)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting

    run(task)
    wait_for(lambda: not worker.in_system)


def test_the_queue_has_a_limit(worker: EngineWorker, llm: LLM) -> None:
    async def task() -> None:
        taken = [await worker.submit([request(llm, 200, seed=i)], f"r{i}") for i in range(4 + 8)]
        with pytest.raises(QueueFull) as caught:
            await worker.submit([request(llm)], "more")
        assert caught.value.retry_after >= 1
        for generation in taken:
            generation.cancel()

    run(task)
    wait_for(lambda: not worker.in_system)


def test_times_begin_before_the_engine_looks_at_a_request(worker: EngineWorker, llm: LLM) -> None:
    """A step of many seconds may be under way."""

    async def task() -> tuple[float, float]:
        generation = await worker.submit([request(llm, 500)], "x")
        return generation.arrived, await worker.call(lambda llm: llm.engine.sequences("x")[0].arrival)

    arrived, counted = run(task)
    assert counted == arrived
    wait_for(lambda: not worker.in_system)


def test_urgent_requests_start_first(worker: EngineWorker, llm: LLM) -> None:
    order: list[str] = []

    async def one(name: str, priority: int, tokens: int = 2) -> None:
        await outputs(await worker.submit([request(llm, tokens, priority=priority)], name))
        order.append(name)

    async def task() -> None:
        blockers = [asyncio.create_task(one(f"blocker {i}", 0, 40)) for i in range(4)]
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(one(name, p)) for name, p in (("later", 5), ("usual", 0), ("now", -5))]
        held = [asyncio.create_task(one(f"held {i}", -9, 400)) for i in range(3)]  # one slot is left for the others
        await asyncio.gather(*blockers, *others)
        for held_task in held:
            held_task.cancel()
        worker.stop()

    run(task)
    assert [name for name in order if name in ("now", "usual", "later")] == ["now", "usual", "later"]


def test_draining_lets_requests_end(worker: EngineWorker, llm: LLM) -> None:
    async def task() -> None:
        generation = await worker.submit([request(llm, 20)], "x")
        worker.drain()
        with pytest.raises(Unavailable):
            await worker.submit([request(llm)], "y")
        assert not await worker.idle(0)
        assert len((await outputs(generation))[0, 0].token_ids) == 20
        assert await worker.idle(5)

    run(task)


def test_stopping_tells_everybody(worker: EngineWorker, llm: LLM) -> None:
    async def task() -> None:
        generation = await worker.submit([request(llm, 1500)], "x")
        await asyncio.to_thread(worker.stop)
        with pytest.raises(Unavailable, match="shutting down"):
            await outputs(generation)
        with pytest.raises(Unavailable):
            await worker.submit([request(llm)], "y")
        with pytest.raises(Unavailable):
            await worker.call(lambda llm: None)

    run(task)


def test_an_engine_that_fails_tells_everybody(llm: LLM) -> None:
    worker = EngineWorker(llm).start()
    wait_for(lambda: worker.state == "ready")

    def fail() -> Any:
        raise RuntimeError("broken")

    llm.engine.step = fail  # type: ignore[method-assign]

    async def task() -> None:
        with pytest.raises(EngineDied, match="broken"):
            await outputs(await worker.submit([request(llm)], "x"))
        for call in (lambda: worker.submit([request(llm)], "y"), lambda: worker.call(lambda llm: None)):
            with pytest.raises(EngineDied):
                await call()

    run(task)
    assert worker.state == "failed"


def test_a_step_that_fails_ends_what_runs_and_the_engine_goes_on(
    worker: EngineWorker, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, faults = llm.engine.runner.decode, [RuntimeError("nobody's")]

    def decode(*args: Any) -> Any:
        if faults:
            raise faults.pop()
        return real(*args)

    monkeypatch.setattr(llm.engine.runner, "decode", decode)

    async def task() -> None:
        with pytest.raises(StepFailed, match="a decode step failed") as caught:
            await outputs(await worker.submit([request(llm)], "x"))
        assert api_error(caught.value).status == 500
        found = await outputs(await worker.submit([request(llm)], "y"))
        assert [len(out.token_ids) for out in found.values()] == [5]

    run(task)
    assert worker.state == "ready"


def test_nobody_hangs_when_the_engine_fails_between_two_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = EngineWorker(llm).start()
    wait_for(lambda: worker.state == "ready")
    go_on = threading.Event()

    def fail(request_id: str) -> Any:
        raise RuntimeError("broken")

    async def task() -> None:
        generation = await worker.submit([request(llm, 1500)], "x")
        monkeypatch.setattr(llm.engine, "abort", fail)
        held = asyncio.create_task(worker.call(lambda llm: go_on.wait(20)))
        await asyncio.sleep(0.05)
        generation.cancel()
        late = [asyncio.create_task(worker.submit([request(llm)], "y")), asyncio.create_task(worker.inspect("x"))]
        await asyncio.sleep(0.05)
        go_on.set()
        await held
        for waiting in (*late, outputs(generation)):
            with pytest.raises(EngineDied, match="broken"):
                await waiting

    run(task)


def test_an_idle_engine_uses_no_time(worker: EngineWorker) -> None:
    thread = next(t for t in threading.enumerate() if t.name == "siftkv-engine")
    clock = time.pthread_getcpuclockid(thread.ident)  # type: ignore[arg-type]
    time.sleep(0.05)
    before = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.01


def test_snapshots_and_inspection(worker: EngineWorker, llm: LLM) -> None:
    async def task() -> None:
        generation = await worker.submit([request(llm, 1500)], "seen")
        async for _ in generation.batches():
            break
        assert (await worker.inspect("seen"))["id"] == "seen"
        with pytest.raises(RequestError):
            await worker.inspect("other")
        end = time.monotonic() + 10
        while not worker.snapshot()["running"]:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        assert [entry["id"] for entry in worker.snapshot()["requests"]] == ["seen"]
        generation.cancel()
        while worker.snapshot()["running"]:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)

    run(task)
