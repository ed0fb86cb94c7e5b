"""Runs the application in uvicorn: the port first, then the model; SIGTERM drains."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI

from siftkv.engine.llm import LLM
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import SiftKVError
from siftkv.server.app import create_app
from siftkv.server.settings import ServerSettings
from siftkv.server.worker import EngineWorker

_LAST_WRITES_SECONDS = 3
"""How long connections may take to send what they have, after the engine is idle."""
SWITCH_SECONDS = 0.00005
"""How long a thread may hold the interpreter while another waits. At Python's 5 ms each of the engine's calls into
torch, which let go of the interpreter and want it back, could wait that long for an event loop that is busy. With 192
streams on an H200 the server ran at 0.97 of the speed of `LLM.generate`, and at 0.88 with four times this value.
"""
_WARM_UP_TOKENS = 256
_WARM_UP_STEPS = 4
_log = logging.getLogger("siftkv.server")


@dataclass(frozen=True)
class Address:
    """Where to listen. keyfile, certfile: PEM files for TLS, both or none."""

    host: str = "127.0.0.1"
    port: int = 8000
    keyfile: str | None = None
    certfile: str | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certfile else 'http'}://{host}:{self.port}"


def warm_up(llm: LLM) -> None:
    """Compile and capture what requests will run, so that the first one does not wait for it, and have the garbage
    collector pass over all that is there by now: a look at it takes longer than a step.
    """
    graphs = llm.engine.runner.graphs
    if graphs is not None:
        graphs.capture_all()
    room = llm.engine.max_model_len - _WARM_UP_STEPS
    prompt = [1] * max(1, min(_WARM_UP_TOKENS, room))
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=_WARM_UP_STEPS, ignore_eos=True))
    gc.collect()
    gc.freeze()


def listen(address: Address) -> socket.socket:
    """A bound socket. Raises SiftKVError with what is wrong: the port is in use, may not be used, the host is not
    here.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
        bound.listen(2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {address.port} on {address.host} is in use: stop what listens there, or choose --port"
            raise SiftKVError(message) from error
        raise SiftKVError(f"cannot listen on {address.url}: {error.strerror or error}") from error
    return bound


class Server(uvicorn.Server):
    """uvicorn's server, which drains its worker before it shuts down."""

    def __init__(self, config: uvicorn.Config, worker: EngineWorker, drain_seconds: float) -> None:
        super().__init__(config)
        self._worker = worker
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.interrupted = False
        """Whether Ctrl-C ended it."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal is not raised again afterwards: a server that has drained has done well."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends at once."""
        if self._worker.state == "draining":
            self.should_exit = self.force_exit = True
        self.interrupted = sig == signal.SIGINT
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """In the event loop: take no more requests, and shut down when the running ones have ended."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    def end(self) -> None:
        """Shut down without draining; from any thread."""
        self.should_exit = True

    async def _drain(self) -> None:
        self._worker.drain()
        _log.info("draining: %d completions are under way", self._worker.in_system)
        if not await self._worker.idle(self._drain_seconds):
            _log.warning("%d completions did not end in %g s", self._worker.in_system, self._drain_seconds)
        # In a thread: the step under way may take a while, and its answers need the event loop.
        await asyncio.to_thread(self._worker.stop)
        self.should_exit = True


def make_server(worker: EngineWorker, settings: ServerSettings, address: Address, app: FastAPI | None = None) -> Server:
    """A server for a worker, which is not started here."""
    config = uvicorn.Config(
        app or create_app(worker, settings),
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_keyfile=address.keyfile,
        ssl_certfile=address.certfile,
        timeout_graceful_shutdown=_LAST_WRITES_SECONDS,
        timeout_keep_alive=65,
    )
    return Server(config, worker, settings.drain_seconds)


def serve(
    worker: EngineWorker,
    settings: ServerSettings,
    address: Address,
    bound: socket.socket,
    announce: Callable[[], None] = lambda: None,
) -> None:
    """Serve on a bound socket until a signal or a failure. announce: called in the engine's thread once the model is
    loaded.

    Raises the error by which the model could not be loaded or the engine failed, KeyboardInterrupt after Ctrl-C.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    app = create_app(worker, settings)
    server = make_server(worker, settings, address, app)

    def ready() -> None:
        app.state.service.prepare()
        announce()

    worker.on_ready = ready
    worker.on_load_failure = server.end
    worker.start()
    try:
        server.run(sockets=[bound])
    finally:
        worker.stop()
        bound.close()
    if worker.error is not None:
        raise worker.error
    if server.interrupted:
        raise KeyboardInterrupt
