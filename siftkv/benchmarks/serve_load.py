"""A client that loads an OpenAI-compatible server, and writes down what became of each request."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from siftkv.errors import SiftKVError

Status = Literal["ok", "error", "left", "refused", "accepted"]
"""ok: a whole answer. error: none, or a broken one. left: the client went away on purpose. refused, accepted: what
became of a request that was malformed on purpose.
"""

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Target:
    """A server and how to ask it. url: without `/v1`. model: empty = the first one that it lists. extra: further fields
    of every body. timeout: seconds without a word from the server.
    """

    url: str
    model: str = ""
    endpoint: Literal["completions", "chat"] = "completions"
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def client(self) -> httpx.AsyncClient:
        """Connections without a limit of their own: the load alone says how many are open."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(self.timeout, connect=30.0)
        return httpx.AsyncClient(base_url=self.url.rstrip("/"), headers=headers, limits=limits, timeout=timeout)

    @property
    def streams(self) -> bool:
        """Whether answers are asked for as they come; `extra` may say otherwise."""
        return bool(self.extra.get("stream", True))

    def body(self, work: Work) -> dict[str, Any]:
        """The body of one request."""
        prompt: dict[str, Any] = {"prompt": work.prompt}
        if self.endpoint == "chat":
            prompt = {"messages": [{"role": "user", "content": work.prompt}]}
        shared = {"model": self.model, "max_tokens": work.max_tokens, "stream": self.streams}
        options = {"stream_options": {"include_usage": True}} if self.streams else {}
        return shared | options | prompt | self.extra


@dataclass(frozen=True)
class Work:
    """One request. leave_after: go away once so many pieces of the answer have come, None = stay. malformed: a body to
    send instead.
    """

    prompt: str | list[int]
    max_tokens: int
    leave_after: int | None = None
    malformed: bytes | None = None


@dataclass
class Outcome:
    """What became of one request. Times in seconds: started from the start of the run, the others from `started`.

    asked: tokens that it asked for at most. piece_s: when each piece of the answer came. output_tokens: as the server
    counts them, else pieces. kv: `usage.kv`. tokens: `(text, gap)` of every token where log-probabilities were asked
    for; gap between the two likeliest, in nats.
    """

    started: float
    status: Status = "error"
    code: int | None = None
    error: str | None = None
    text: str = ""
    piece_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    kv: dict[str, Any] | None = None
    tokens: list[tuple[str, float]] = field(default_factory=list)
    asked: int = 0

    @property
    def ttft_s(self) -> float:
        """To the first piece."""
        return self.piece_s[0]

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 for an answer of one token."""
        return (self.piece_s[-1] - self.piece_s[0]) / max(1, self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces: inter-token latencies."""
        return [b - a for a, b in zip(self.piece_s, self.piece_s[1:])]


class Load:
    """Sends requests to one target and writes down what becomes of them. Use it as an async context manager."""

    def __init__(self, target: Target, progress: Callable[[], None] = lambda: None) -> None:
        self.target = target
        self.progress = progress
        self._client = target.client()
        self._began = 0.0

    async def __aenter__(self) -> Load:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def open_loop(self, works: Sequence[Work], times: Sequence[float]) -> list[Outcome]:
        """Requests that arrive at `times` whatever the server does."""
        self._began = time.perf_counter()

        async def at(moment: float, work: Work) -> Outcome:
            await asyncio.sleep(self._began + moment - time.perf_counter())
            return await self._send(work)

        return list(await asyncio.gather(*(at(t, w) for t, w in zip(times, works, strict=True))))

    async def closed_loop(self, works: Sequence[Work], concurrency: int, seconds: float | None) -> list[Outcome]:
        """`concurrency` clients, each of which sends its next request when its last has ended: all of `works` once, or
        over and over until `seconds` have passed. Outcomes are in the order in which requests were sent.
        """
        self._began = time.perf_counter()
        outcomes: list[Outcome] = []
        sent = 0

        async def client() -> None:
            nonlocal sent
            while (sent < len(works)) if seconds is None else (time.perf_counter() - self._began < seconds):
                place, sent = sent, sent + 1
                outcomes.append(Outcome(0.0))
                outcomes[place] = await self._send(works[place % len(works)])

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return outcomes

    async def _send(self, work: Work) -> Outcome:
        outcome = Outcome(time.perf_counter() - self._began, asked=work.max_tokens)
        send: Callable[[Work, Outcome], Awaitable[None]] = self._stream if self.target.streams else self._answer
        if work.malformed is not None:
            send = self._malformed
        try:
            await send(work, outcome)
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            outcome.status, outcome.error = "error", f"{type(error).__name__}: {error}"[:300]
        outcome.end_s = self._since(outcome)
        self.progress()
        return outcome

    def _since(self, outcome: Outcome) -> float:
        return time.perf_counter() - self._began - outcome.started

    async def _malformed(self, work: Work, outcome: Outcome) -> None:
        headers = {"Content-Type": "application/json"}
        path = PATHS[self.target.endpoint]
        response = await self._client.post(path, content=work.malformed, headers=headers)
        outcome.code = response.status_code
        if 400 <= response.status_code < 500:
            outcome.status = "refused"
        elif response.status_code < 400:
            outcome.status, outcome.error = "accepted", "a malformed request was accepted"
        else:
            outcome.error = f"{response.status_code}: {response.text[:200]}"

    async def _answer(self, work: Work, outcome: Outcome) -> None:
        """A whole answer in one piece."""
        response = await self._client.post(PATHS[self.target.endpoint], json=self.target.body(work))
        outcome.code = response.status_code
        if response.status_code != 200:
            outcome.error = f"{response.status_code}: {response.text[:200]}"
            return
        answer = response.json()
        for choice in answer["choices"]:
            choice["text"] = choice.get("text") or (choice.get("message") or {}).get("content")
        self._take(answer, outcome)
        self._whole(outcome)

    async def _stream(self, work: Work, outcome: Outcome) -> None:
        if work.leave_after == 0:
            await self._leave_at_once(work, outcome)
            return
        path = PATHS[self.target.endpoint]
        async with self._client.stream("POST", path, json=self.target.body(work)) as response:
            outcome.code = response.status_code
            if response.status_code != 200:
                outcome.error = f"{response.status_code}: {(await response.aread()).decode('utf-8', 'replace')[:200]}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    self._whole(outcome)
                    return
                self._take(json.loads(data), outcome)
                if outcome.error is not None:
                    return
                if work.leave_after is not None and len(outcome.piece_s) >= work.leave_after:
                    outcome.status = "left"
                    return
        outcome.error = "the stream ended without [DONE]"

    async def _leave_at_once(self, work: Work, outcome: Outcome) -> None:
        """Go away before the answer begins: while the request waits, or during its prompt."""
        body = self.target.body(work)
        request = asyncio.ensure_future(self._client.post(PATHS[self.target.endpoint], json=body))
        await asyncio.wait([request], timeout=0.05)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        outcome.status = "left"

    def _take(self, event: dict[str, Any], outcome: Outcome) -> None:
        if "error" in event:
            outcome.error = str(event["error"].get("message", event["error"]))[:200]
            return
        usage = event.get("usage")
        if usage:
            outcome.prompt_tokens = usage.get("prompt_tokens", 0)
            outcome.output_tokens = usage.get("completion_tokens", 0)
            outcome.kv = usage.get("kv")
        for choice in event.get("choices", ()):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if piece:
                outcome.piece_s.append(self._since(outcome))
                outcome.text += piece
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
            outcome.tokens += _token_gaps(choice.get("logprobs"))

    def _whole(self, outcome: Outcome) -> None:
        if outcome.finish_reason is None:
            outcome.error = "the answer has no finish_reason"
            return
        outcome.status = "ok"
        outcome.output_tokens = outcome.output_tokens or len(outcome.piece_s)
        outcome.piece_s = outcome.piece_s or [self._since(outcome)]


def _token_gaps(logprobs: dict[str, Any] | None) -> list[tuple[str, float]]:
    """Tokens of a `logprobs` object, a completion's or a chat's, and how far their two likeliest candidates stand
    apart.
    """
    if not logprobs:
        return []
    if "content" in logprobs:
        entries = [(x["token"], [t["logprob"] for t in x["top_logprobs"]]) for x in logprobs["content"] or ()]
    else:
        tops = [list((top or {}).values()) for top in logprobs["top_logprobs"] or ()]
        entries = list(zip(logprobs["tokens"], tops, strict=True))
    best = [(token, sorted(top, reverse=True)[:2]) for token, top in entries]
    return [(token, top[0] - top[1] if len(top) == 2 else math.inf) for token, top in best]


async def served_model(target: Target) -> str:
    """The model to ask for. Raises SiftKVError when the server does not answer or lists none."""
    try:
        async with target.client() as client:
            response = await client.get("/v1/models")
            response.raise_for_status()
            return target.model or str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SiftKVError(f"no OpenAI-compatible server answers at {target.url}: {error}") from error
