"""A server for the dashboard alone: a real engine that runs in a thread, and a chat endpoint with a fixed answer."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

import siftkv.server
from siftkv import LLM, SamplingParams, parse_policy
from siftkv.server import stats
from siftkv.server.metrics import ServerMetrics
from tests.tiny import prompt

DASHBOARD = Path(siftkv.server.__file__).parent / "dashboard"
WORDS = ["A", " sieve", " keeps", " what", " matters", "."]


class TurningWorker:
    """Steps an engine until it is stopped; `inspect` and `snapshot` take turns with the steps."""

    def __init__(self, llm: LLM, pause: float = 0.02) -> None:
        self.llm, self.metrics, self.pause, self.state = llm, ServerMetrics(), pause, "ready"
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, length: int, kv: str, max_tokens: int, seed: int, request_id: str) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1.0, seed=seed)
        with self._lock:
            self.llm.engine.add(prompt(length, seed), params, parse_policy(kv), request_id=request_id)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                for chunk in self.llm.engine.step() if self.llm.engine.has_work else []:
                    self.metrics.further_tokens([self.pause])
                    if chunk.finish_reason is not None:
                        self.llm.engine.forget(chunk.request_id)
            time.sleep(self.pause)

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return stats.collect(self.llm)

    async def inspect(self, request_id: str) -> dict[str, Any]:
        with self._lock:
            return stats.inspect_request(self.llm, request_id)


def dashboard_app(worker: TurningWorker, key: str | None = None) -> FastAPI:
    """The dashboard's routes and files; every route but the page's files asks for `key`."""
    app = FastAPI()
    app.include_router(stats.router(worker))
    app.mount("/dashboard", StaticFiles(directory=DASHBOARD))

    @app.middleware("http")
    async def check(request: Request, call_next: Any) -> Any:
        free = request.url.path == "/" or request.url.path.startswith("/dashboard")
        if key is not None and not free and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        return await call_next(request)

    @app.get("/")
    async def page() -> FileResponse:
        return FileResponse(DASHBOARD / "index.html")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "tiny"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Any:
        body = await request.json()
        if body.get("kv") == "nonsense":
            return JSONResponse({"error": {"message": "kv: there is no policy 'nonsense'"}}, 400)

        async def words() -> AsyncIterator[str]:
            for word in WORDS:
                yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': word}}]})}\n\n"
                await asyncio.sleep(0.02)
            kv = {"physical_bytes": 1234, "ratio": 0.25, "tokens_by_tier": {"k8v4": 3, "dropped": 1}}
            usage = {"prompt_tokens": 4, "completion_tokens": len(WORDS), "kv": kv}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(words(), media_type="text/event-stream")

    return app


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The app on a free port of this machine; its base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
