"""Clients that behave and clients that do not, and what is wrong with the answers that they got."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

TIE = 1e-4
"""Where two runs differ, the two likeliest tokens must be closer than this (natural log-probabilities)."""
WORDS = [
    "the",
    "sea",
    "is",
    "blue",
    "and",
    "a",
    "ship",
    "sails",
    "over",
    "it",
    "to",
    "find",
    "what",
    "old",
    "maps",
    "call",
    "the",
    "end",
    "of",
    "all",
    "things",
    "known",
]
MALFORMED: list[bytes] = [
    b"",
    b"{",
    b'{"prompt": 5}',
    b'{"prompt": "a", "max_tokens": "b"}',
    b'{"prompt": "a", "temperature": -3}',
    b'{"prompt": "a", "kv": "nonsense"}',
    b'{"prompt": [1, 99999999]}',
    b'{"prompt": "a", "n": 0}',
    b'{"prompt": "a", "model": "other"}',
    b'{"prompt": "a", "response_format": {"type": "json_schema"}}',
]


@dataclass(frozen=True)
class Job:
    """One request. kind: `whole`, `stream`, `leave` or `malformed`. leave_after: events before the client goes away."""

    kind: str
    prompt: str
    max_tokens: int
    leave_after: int = 0
    body: bytes = b""

    def request(self) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "logprobs": 2}
        return body | ({} if self.kind == "whole" else {"stream": True, "stream_options": {"include_usage": True}})


@dataclass
class Answer:
    """What came back. tokens, gaps: each token's text, and the log-probability between the two likeliest there."""

    status: int = 0
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    counted: int = -1
    error: str = ""

    def add(self, choice: dict[str, Any]) -> None:
        self.text += choice["text"]
        report = choice["logprobs"]
        if report:
            self.tokens += report["tokens"]
            for top in report["top_logprobs"]:
                best = sorted(top.values(), reverse=True)
                self.gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)


def make_jobs(
    count: int, seed: int, leave: float = 0.3, malformed: float = 0.1, *, prompts: int = 24, longest: int, words: int
) -> list[Job]:
    """`count` jobs over `prompts` different prompts of up to `words` words, with up to `longest` tokens to generate;
    shares `leave` and `malformed` of them misbehave.
    """
    draw = random.Random(seed)
    kinds = [" ".join(draw.choices(WORDS, k=draw.randint(2, words))) for _ in range(prompts)]
    lengths = [draw.randint(4, longest) for _ in kinds]
    jobs = []
    for _ in range(count):
        which, dice = draw.randrange(prompts), draw.random()
        prompt, tokens = kinds[which], lengths[which]
        if dice < malformed:
            jobs.append(Job("malformed", "", 0, body=draw.choice(MALFORMED)))
        elif dice < malformed + leave:
            jobs.append(Job("leave", prompt, tokens, leave_after=draw.randint(0, tokens // 2)))
        else:
            jobs.append(Job(draw.choice(["whole", "stream"]), prompt, tokens))
    return jobs


async def send(client: httpx.AsyncClient, job: Job) -> Answer:
    """Do one job. Errors of the server are in the answer; those of the connection are raised."""
    answer = Answer()
    if job.kind == "malformed":
        response = await client.post("/v1/completions", content=job.body, headers={"Content-Type": "application/json"})
        answer.status, answer.error = response.status_code, response.json()["error"]["message"]
        return answer
    if job.kind == "whole":
        response = await client.post("/v1/completions", json=job.request())
        answer.status, body = response.status_code, response.json()
        if response.status_code == 200:
            answer.add(body["choices"][0])
            answer.counted = body["usage"]["completion_tokens"]
        else:
            answer.error = body["error"]["message"]
        return answer
    async with client.stream("POST", "/v1/completions", json=job.request()) as response:
        answer.status = response.status_code
        events = 0
        if job.kind == "leave" and not job.leave_after:
            return answer
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _read(answer, json.loads(line[6:]))
                events += 1
                if job.kind == "leave" and events >= job.leave_after:
                    return answer
    return answer


def _read(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        answer.add(choice)
    if event["usage"]:
        answer.counted = event["usage"]["completion_tokens"]


async def run(url: str, jobs: Sequence[Job], at_once: int = 32) -> list[Answer]:
    gate = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(job: Job) -> Answer:
            async with gate:
                return await send(client, job)

        return list(await asyncio.gather(*(one(job) for job in jobs)))


def faults(jobs: Sequence[Job], answers: Sequence[Answer], undisturbed: dict[tuple[str, int], Answer]) -> list[str]:
    """What is wrong with a disturbed run, against answers of a run in which nobody misbehaved."""
    found = []
    for job, answer in zip(jobs, answers, strict=True):
        if job.kind == "malformed":
            if not (400 <= answer.status < 500 and answer.error):
                found.append(f"malformed {job.body!r} got {answer.status}")
        elif answer.status != 200 or answer.error:
            found.append(f"{job.kind} got {answer.status}: {answer.error}")
        elif job.kind in ("whole", "stream"):
            found += _differences(answer, undisturbed[job.prompt, job.max_tokens])
    return found


def _differences(answer: Answer, expected: Answer) -> list[str]:
    if answer.counted != len(answer.tokens):
        return [f"{len(answer.tokens)} tokens came and {answer.counted} were counted"]
    if answer.tokens == expected.tokens:
        return [] if answer.text == expected.text else ["the same tokens made another text"]
    place = next((i for i, (a, b) in enumerate(zip(answer.tokens, expected.tokens)) if a != b), -1)
    if place >= 0 and expected.gaps[place] < TIE:
        return []
    return [f"token {place} differs where the gap is {expected.gaps[place] if place >= 0 else 'none'}"]
