"""A small OpenAI-compatible server whose answers, delays and faults are known, and a client's load on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from siftkv.benchmarks.serve_load import Load, Outcome, Target, Work

SLOW, FAIL, CUT, QUIET = "slow", "fail", "cut", "quiet"


class FakeServer:
    """Answers " w" `max_tokens` times, one every `delay` seconds; prompts that begin with a word above misbehave."""

    def __init__(self, delay: float = 0.002) -> None:
        self.delay = delay
        self.live = self.most = self.finished = self.left = 0
        self.bodies: list[dict[str, Any]] = []
        self.drift = 0
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/completions")(self.answer)
        self.app.post("/v1/chat/completions")(self.answer)
        self.app.get("/api/snapshot")(self.snapshot)

    async def models(self) -> dict[str, Any]:
        return {"data": [{"id": "fake"}]}

    async def snapshot(self) -> dict[str, Any]:
        pages = {"free": 10, "total": 10}
        return {"running": self.live, "waiting": 0, "swapped": 0, "pages": pages, "integrity": {"ok": True}}

    async def answer(self, request: Request) -> Any:
        body = self._read(await request.body())
        if body is None:
            return JSONResponse({"error": {"message": "malformed"}}, 400)
        self.bodies.append(body)
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        kind = prompt.split()[0] if isinstance(prompt, str) else ""
        if kind == FAIL:
            return JSONResponse({"error": {"message": "no luck"}}, 500)
        return StreamingResponse(self._pieces(body, chat, kind), media_type="text/event-stream")

    @staticmethod
    def _read(raw: bytes) -> dict[str, Any] | None:
        try:
            body = json.loads(raw)
            chat = "messages" in body
            good = (
                isinstance(body["max_tokens"], int)
                and body["max_tokens"] > 0
                and isinstance(body.get("temperature", 0), (int, float))
                and body.get("top_p", 1) <= 1
                and body["model"] == "fake"
                and isinstance(body.get("stop", ""), str)
                and (body["messages"] if chat else body["prompt"])
                and isinstance(body["messages"] if chat else body["prompt"], list if chat else (str, list))
            )
        except (ValueError, KeyError, TypeError):
            return None
        return body if good else None

    async def _pieces(self, body: dict[str, Any], chat: bool, kind: str) -> AsyncIterator[str]:
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            count = body["max_tokens"]
            for i in range(count):
                await asyncio.sleep(self.delay * (20 if kind == SLOW and i == 0 else 1))
                word = "" if kind == QUIET else " w" if not self.drift or i != 2 else f" x{self.drift}"
                logprobs = {"tokens": [word], "top_logprobs": [{word: -0.1, " y": -0.1 - 5e-5 * (1 + (i == 1))}]}
                last = {"finish_reason": "length" if i == count - 1 else None, "index": 0}
                part = {"delta": {"content": word}} if chat else {"text": word, "logprobs": logprobs}
                yield f"data: {json.dumps({'choices': [part | last]})}\n\n"
                if kind == CUT and i == 1:
                    return
            usage = {"prompt_tokens": 3, "completion_tokens": count, "kv": {"ratio": 0.25}}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
            self.finished += 1
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.live -= 1


def send(target: Target, works: list[Work], clients: int = 4, seconds: float | None = None) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with Load(target) as load:
            return await load.closed_loop(works, clients, seconds)

    return asyncio.run(run())
