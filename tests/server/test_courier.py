"""From the engine's thread into the event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from siftkv.engine.outputs import CompletionOutput, StreamChunk, TokenLogprob
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import RequestError
from siftkv.policies import parse_policy
from siftkv.server import courier
from siftkv.server.courier import Couriers, Parcel
from siftkv.server.generation import Generation, GenerationRequest, merged


def generation() -> Generation:
    request = GenerationRequest([1], SamplingParams(n=1), parse_policy("full"))
    return Generation([request], "id", lambda _: None)


def chunk(text: str, index: int = 0, end: bool = False) -> StreamChunk:
    output = CompletionOutput(index, text, [7], "length") if end else None
    logprob = TokenLogprob(7, -1.0, {})
    return StreamChunk("id", index, text, [ord(text)], [logprob], "length" if end else None, output)


def in_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_everything_arrives_in_order_and_ends() -> None:
    async def run() -> tuple[str, int]:
        couriers, target = Couriers(), generation()

        def steps() -> None:
            for i, letter in enumerate("abcdefghij"):
                couriers.send({target: Parcel([(0, chunk(letter, end=i == 9))])})

        await asyncio.to_thread(steps)
        batches = [batch async for batch in target.batches()]
        return "".join(c.text for batch in batches for _, c in batch), len(batches)

    text, deliveries = asyncio.run(run())
    assert text == "abcdefghij"
    assert deliveries < 10


def test_many_generations_are_reached_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "REST_SECONDS", 0.01)

    async def run(count: int) -> list[float]:
        couriers, targets = Couriers(), [generation() for _ in range(count)]

        def steps() -> None:
            for letter in "ab":
                couriers.send({target: Parcel([(0, chunk(letter, end=letter == "b"))]) for target in targets})
                time.sleep(0.02)

        thread = threading.Thread(target=steps)
        thread.start()
        times = [time.perf_counter() async for _ in targets[-1].batches()]
        await asyncio.to_thread(thread.join)
        return times

    first, second = asyncio.run(run(20))
    assert second - first > 0.15
    first, second = asyncio.run(run(1))
    assert second - first < 0.15


def test_an_error_comes_behind_what_was_sent() -> None:
    async def run() -> str:
        couriers, target = Couriers(), generation()
        in_a_thread(lambda: couriers.send({target: Parcel([(0, chunk("a"))])}))
        in_a_thread(lambda: couriers.send({target: Parcel(error=RequestError("over"))}))
        batches = target.batches()
        [(_, first)] = await anext(batches)
        with pytest.raises(RequestError, match="over"):
            await anext(batches)
        return first.text

    assert asyncio.run(run()) == "a"


def test_chunks_of_a_completion_become_one() -> None:
    items = [(0, chunk("a")), (0, chunk("x", 1)), (1, chunk("p")), (0, chunk("b")), (0, chunk("c", end=True))]
    found = merged(items)
    assert [(place, c.index, c.text) for place, c in found] == [(0, 0, "abc"), (0, 1, "x"), (1, 0, "p")]
    whole = found[0][1]
    assert whole.token_ids == [ord(letter) for letter in "abc"]
    assert len(whole.logprobs or ()) == 3
    assert (whole.finish_reason, whole.output) == ("length", items[-1][1].output)
    assert merged(items[:1]) == items[:1]
