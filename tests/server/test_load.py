"""Many clients at once: what is left when they have gone."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator

import pytest

from siftkv.server.generation import Generation
from tests.server import clients
from tests.server.live import Live, byte_llm, wait_for


@pytest.fixture(scope="module")
def tight() -> Iterator[Live]:
    """Eight requests at a time, in a pool that does not hold eight of the longest: some are preempted."""
    server = Live(byte_llm(formats=(), max_num_seqs=8, max_model_len=256, kv_cache_memory_bytes=560_000)).ready()
    yield server
    server.check_settled()
    server.close()


def test_32_streams_at_once(live: Live) -> None:
    jobs = [
        clients.Job("stream", job.prompt, job.max_tokens)
        for job in clients.make_jobs(32, 3, 0, 0, longest=20, words=12)
    ]
    answers = asyncio.run(clients.run(live.url, jobs))
    expected = {(job.prompt, job.max_tokens): asyncio.run(clients.run(live.url, [job]))[0] for job in jobs[:4]}
    assert clients.faults(jobs[:4], answers[:4], expected) == []
    assert all(answer.status == 200 and answer.counted == len(answer.tokens) > 0 for answer in answers)
    live.check_settled()


def test_clients_that_leave_and_bodies_that_are_wrong(tight: Live) -> None:
    jobs = clients.make_jobs(100, 5, prompts=8, longest=40, words=5)
    distinct = list({(job.prompt, job.max_tokens) for job in jobs if job.kind != "malformed"})
    undisturbed = asyncio.run(clients.run(tight.url, [clients.Job("whole", *pair) for pair in distinct], 1))
    answers = asyncio.run(clients.run(tight.url, jobs))
    assert clients.faults(jobs, answers, dict(zip(distinct, undisturbed))) == []
    assert tight.worker.metrics.counters()["preemptions"] > 0
    assert {job.kind for job in jobs} == {"whole", "stream", "leave", "malformed"}
    tight.check_settled()


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_ends_the_request_within_a_step(live: Live, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gone = live.worker.llm.engine, Generation.client_gone
    step, steps, noticed = engine.step, [], []
    monkeypatch.setattr(engine, "step", lambda: (steps.append(bool(noticed)), step())[1])
    monkeypatch.setattr(Generation, "client_gone", lambda self: (noticed.append(time.monotonic()), gone(self)))
    body = json.dumps({"prompt": "abc", "max_tokens": 1900, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(live.server.servers[0].sockets[0].getsockname()) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_for(lambda: len(steps) > 5)
    closed = time.monotonic()
    wait_for(lambda: not live.worker.in_system)
    assert noticed[0] - closed < 2
    assert sum(steps) <= 1  # begun, or about to begin, when the disconnect was noticed
    live.check_settled()
