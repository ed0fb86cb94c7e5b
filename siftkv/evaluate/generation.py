"""Many requests through the engine, continuously batched, each handed out as soon as it ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from siftkv.engine.engine import Engine
from siftkv.engine.outputs import CompletionOutput
from siftkv.engine.sampling_params import SamplingParams
from siftkv.policies import Policy


@dataclass(frozen=True)
class Request:
    """One completion to generate. key: what the caller calls it."""

    key: str
    prompt_ids: Sequence[int]
    params: SamplingParams


def complete(
    engine: Engine, policy: Policy, requests: Sequence[Request]
) -> Iterator[tuple[str, CompletionOutput, float]]:
    """(key, output, seconds) of every request, in the order in which they end.

    seconds: of the engine's time since the output before, so that their sum is what all took; the caller's own time is
    not in it. Whoever stops early gets the pages of the rest back. Raises RequestError before anything runs, and what
    ended a request (OutOfPages, NumericsError).
    """
    keys: dict[str, str] = {}
    try:
        for request in requests:
            keys[engine.add(request.prompt_ids, request.params, policy)] = request.key
        seconds = 0.0
        while keys:
            start = time.perf_counter()
            chunks = engine.step()
            seconds += time.perf_counter() - start
            for chunk in chunks:
                if chunk.output is None or chunk.request_id not in keys:
                    continue
                error = engine.sequences(chunk.request_id)[0].error
                if error is not None:
                    raise error
                engine.forget(chunk.request_id)
                yield keys.pop(chunk.request_id), chunk.output, seconds
                seconds = 0.0
    finally:
        for request_id in keys:
            engine.abort(request_id)
            engine.forget(request_id)
