"""Sends what a generation gives: one JSON body, or server-sent events. A client that goes away ends its generation."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from siftkv.engine.outputs import CompletionOutput
from siftkv.server.answer_chat import ChatAnswer
from siftkv.server.answer_text import TextAnswer
from siftkv.server.answers import usage
from siftkv.server.errors import api_error
from siftkv.server.generation import ClientGone, Generation, merged
from siftkv.server.protocol import StreamOptions

CLIENT_CLOSED = 499
"""nginx's status for a client that did not wait; nobody receives it, the log has it."""
_log = logging.getLogger("siftkv.server")
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

Answer = ChatAnswer | TextAnswer
Record = dict[str, Any]
"""What the log will say about a request."""


def prompt_tokens(generation: Generation) -> int:
    return sum(len(request.prompt_ids) for request in generation.requests)


@asynccontextmanager
async def _watched(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """While inside, a disconnect cancels the generation; so does whatever leaves it early."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.client_gone()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        generation.cancel()
        watcher.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await watcher


async def whole(generation: Generation, answer: Answer, receive: Receive, record: Record) -> Response:
    """The response when all completions have ended. Raises what ended one early."""
    outputs: dict[tuple[int, int], CompletionOutput] = {}
    try:
        async with _watched(generation, receive):
            async for batch in generation.batches():
                outputs |= {(place, c.index): c.output for place, c in batch if c.output is not None}
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED)
    figures = usage(prompt_tokens(generation), outputs.values())
    record["usage"] = figures
    choices = [answer.choice(place, outputs[place, index]) for place, index in sorted(outputs)]
    return JSONResponse(answer.head | {"object": answer.kind, "choices": choices, "usage": figures})


class EventStream(Response):
    """A generation as server-sent events, the chunks of OpenAI's streams; an error on the way is an event too."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, options: StreamOptions | None, record: Record) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._options = options or StreamOptions()
        self._record = record
        # The same in every event, so encoded once: `{"id": ..., "choices":`.
        self._head = _encode(answer.head | {"object": answer.chunk_kind}).removesuffix("}") + ',"choices":'
        self._outputs: list[CompletionOutput] = []
        self._tokens: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _watched(self._generation, receive):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for events in self._events():
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        except (ClientGone, OSError):
            self._record["status"] = CLIENT_CLOSED

    async def _events(self) -> AsyncIterator[bytes]:
        """Events, as many at a time as have come."""
        yield self._joined(self._answer.opening())
        try:
            async for batch in self._generation.batches():
                events = []
                for place, chunk in merged(batch):
                    self._tokens += len(chunk.token_ids)
                    if chunk.output is not None:
                        self._outputs.append(chunk.output)
                    events += [self._event([choice]) for choice in self._answer.chunk(place, chunk)]
                if events:
                    yield b"".join(events)
        except ClientGone:
            raise
        except Exception as error:
            if api_error(error).status >= 500:
                _log.error("a stream ended with an error: %s", error)
            self._record["error"] = str(error)
            yield f"data: {_encode(api_error(error).body())}\n\n".encode()
            return
        figures = usage(prompt_tokens(self._generation), self._outputs)
        self._record["usage"] = figures
        if self._options.include_usage:
            yield self._event([], figures)

    def _joined(self, choices: Iterator[dict[str, Any]]) -> bytes:
        return b"".join([self._event([choice]) for choice in choices])

    def _event(self, choices: list[dict[str, Any]], figures: dict[str, Any] | None = None) -> bytes:
        if figures is None and self._options.continuous_usage_stats:
            prompt = prompt_tokens(self._generation)
            total = prompt + self._tokens
            figures = {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": total}
        usage = ""
        if figures is not None or self._options.include_usage:
            usage = f',"usage":{_encode(figures)}'
        return f"data: {self._head}{_encode(choices)}{usage}}}\n\n".encode()
