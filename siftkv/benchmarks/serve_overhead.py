"""What HTTP costs: the same requests through `LLM.generate` and through the server, on one engine, turn by turn."""

from __future__ import annotations

import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from siftkv.benchmarks.results import Row
from siftkv.benchmarks.serve_fleet import Closed, Fleet
from siftkv.benchmarks.serve_load import Target, Work
from siftkv.engine.llm import LLM
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import SiftKVError
from siftkv.server import run
from siftkv.server.settings import ServerSettings
from siftkv.server.worker import EngineWorker

SHARE = 0.97
"""Least share of offline throughput that the server is meant to reach when it is saturated."""


@dataclass(frozen=True)
class Way:
    """Output tokens a second, from the first request to the last token. seconds: that time. started_s: until the last
    request had its first token; None for answers that came whole.
    """

    tokens_per_second: float
    seconds: float
    started_s: float | None = None


@dataclass(frozen=True)
class Round:
    """`LLM.generate`, and the server when it streams each token and when it sends whole answers."""

    offline: Way
    streamed: Way
    whole: Way


def measure(
    llm: LLM, works: Sequence[Work], fleet: Fleet, rounds: int, progress: Callable[[str], None] = lambda _: None
) -> list[Round]:
    """Run all of `works` at once, greedy and without early ends, each way in each round. Prompts are token ids.

    Raises SiftKVError when the server does not answer every request whole.
    """
    switch = sys.getswitchinterval()
    sys.setswitchinterval(run.SWITCH_SECONDS)
    address = run.Address(port=0)
    bound = run.listen(address)
    address = replace(address, port=bound.getsockname()[1])
    worker = EngineWorker(llm, max_queue=len(works)).start()
    server = run.make_server(worker, ServerSettings(), address)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        found = []
        for number in range(rounds):
            offline = asyncio.run(worker.call(lambda llm: _offline(llm, works)))
            streamed, whole = (_through_http(address.url, works, fleet, stream) for stream in (True, False))
            found.append(Round(offline, streamed, whole))
            rates = [way.tokens_per_second for way in (offline, streamed, whole)]
            progress("round {}: {:.1f} tokens/s, streamed {:.1f}, whole {:.1f}".format(number + 1, *rates))
        return found
    finally:
        server.end()
        thread.join()
        worker.stop()
        sys.setswitchinterval(switch)


def _offline(llm: LLM, works: Sequence[Work]) -> Way:
    params = [SamplingParams(temperature=0, max_tokens=work.max_tokens, ignore_eos=True) for work in works]
    began = time.perf_counter()
    outputs = llm.generate([work.prompt for work in works], params)
    seconds = time.perf_counter() - began
    started = max(output.metrics.first_token_s for output in outputs if output.metrics is not None)
    return Way(sum(len(output.token_ids) for output in outputs) / seconds, seconds, started)


def _through_http(url: str, works: Sequence[Work], fleet: Fleet, stream: bool) -> Way:
    target = Target(url, extra={"temperature": 0, "ignore_eos": True, "stream": stream})
    outcomes = asyncio.run(fleet.send(target, works, Closed(len(works))))
    error = next((outcome.error for outcome in outcomes if outcome.status != "ok"), None)
    if error is not None:
        raise SiftKVError(f"the server did not answer a request whole: {error}")
    missing = sum(outcome.asked - outcome.output_tokens for outcome in outcomes)
    if missing:
        raise SiftKVError(f"{missing} tokens are missing from the answers")
    began, ended = min(o.started for o in outcomes), max(o.started + o.end_s for o in outcomes)
    started = max(o.started + o.ttft_s for o in outcomes) - began if stream else None
    return Way(sum(o.output_tokens for o in outcomes) / (ended - began), ended - began, started)


def rows(found: Sequence[Round], label: str) -> list[Row]:
    """The figures that a results file lists: medians over rounds."""
    rates = {way: [getattr(part, way).tokens_per_second for part in found] for way in ("offline", "streamed", "whole")}
    offline, streamed, whole = map(statistics.median, rates.values())
    shares = {
        way: statistics.median(a / b for a, b in zip(rates[way], rates["offline"])) for way in ("streamed", "whole")
    }
    bar = f">= {SHARE}"
    return [
        Row(what=f"{label}: LLM.generate", value=offline, unit="tokens/s"),
        Row(what=f"{label}: server, streamed", value=streamed, unit="tokens/s"),
        Row(what=f"{label}: server, whole answers", value=whole, unit="tokens/s"),
        Row(what=f"{label}: server, streamed, by LLM.generate", value=shares["streamed"], bar=bar),
        Row(what=f"{label}: server, whole answers, by LLM.generate", value=shares["whole"], bar=bar),
    ]


def to_data(found: Sequence[Round], label: str, about: dict[str, Any]) -> dict[str, Any]:
    """The `data` of a results file."""
    return about | {"label": label, "rounds": [asdict(part) for part in found]}
