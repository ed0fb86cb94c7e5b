"""The engine in a thread of its own. The event loop hands requests in and gets what each step added; it never waits for
a step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from siftkv.engine.llm import LLM
from siftkv.errors import RequestError, SiftKVError
from siftkv.server import stats
from siftkv.server.errors import EngineDied, QueueFull, Unavailable
from siftkv.server.generation import Generation, GenerationRequest
from siftkv.server.ledger import Ledger
from siftkv.server.metrics import ServerMetrics

State = Literal["starting", "ready", "draining", "stopped", "failed"]
T = TypeVar("T")

WANTED_SECONDS = 0.25
"""Age at which a snapshot is renewed while somebody asks for it."""
USUAL_SECONDS = 1.0
"""Age at which it is renewed anyway while requests run."""
SNAPSHOT_SHARE, ASKED_SHARE = 0.002, 0.01
"""Most of the engine's time that snapshots may take, and while somebody asks for them: on a GPU each one waits for the
step that is on its way.
"""
_ASKED_LATELY_SECONDS = 3.0
_log = logging.getLogger("siftkv.server")


@dataclass(frozen=True)
class _Command:
    """Something to do on the engine's thread, and what to do with the reason when it cannot be done any more."""

    run: Callable[[LLM], None]
    refuse: Callable[[SiftKVError], None]


class EngineWorker:
    """Owns an `LLM` and the thread that runs it. All methods may be called from any event loop or thread.

    load: makes the LLM, in the worker's thread, so that the server can answer meanwhile; or an LLM that is ready.
    max_queue: completions that may wait beside the `max_num_seqs` that run. metrics: where to count; a new one by
    default.
    """

    def __init__(self, load: LLM | Callable[[], LLM], max_queue: int = 1024, metrics: ServerMetrics | None = None):
        self._load = load
        self.max_queue = max_queue
        self.metrics = metrics or ServerMetrics()
        self.state: State = "starting"
        self.error: BaseException | None = None
        self.on_ready: Callable[[], None] = lambda: None
        """Called in the engine's thread when the model is loaded, before requests are taken."""
        self.on_load_failure: Callable[[], None] = lambda: None
        """Called in the engine's thread when it cannot be."""
        self._llm: LLM | None = None
        self._ledger = Ledger(self.metrics)
        self._wake = threading.Condition()
        self._inbox: deque[_Command] = deque()
        self._in_system = 0
        self._stopping = False
        self._snapshot: dict[str, Any] = {}
        self._snapshot_at = self._snapshot_seconds = 0.0
        self._asked_at = 0.0
        self._thread = threading.Thread(target=self._run, name="siftkv-engine", daemon=True)

    @property
    def llm(self) -> LLM:
        """The LLM; raises Unavailable while it is being loaded. Only the engine's thread may change it."""
        if self._llm is None:
            raise Unavailable("the model is still being loaded: try again in a moment")
        return self._llm

    @property
    def in_system(self) -> int:
        """Completions that were accepted and have not ended."""
        return self._in_system

    def start(self) -> EngineWorker:
        self._thread.start()
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """End every request with Unavailable, then the thread. Loading a model cannot be interrupted: its thread is not
        waited for.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and self._llm is not None:
            self._thread.join(timeout)

    def drain(self) -> None:
        """Take no more requests; those that were accepted go on."""
        if self.state in ("starting", "ready"):
            self.state = "draining"

    async def idle(self, timeout: float) -> bool:
        """Wait until every accepted request has ended; false if some have not in `timeout` seconds."""
        end = time.monotonic() + timeout
        while self._in_system and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return not self._in_system

    async def submit(self, requests: Sequence[GenerationRequest], request_id: str, whole: bool = False) -> Generation:
        """Queue requests that belong together, all or none. Their ids are `request_id`, with `-1` and so on for those
        after the first. whole: their completions are read once they have ended.

        Raises Unavailable, EngineDied, QueueFull or RequestError for more than the queue ever holds, and what
        `Engine.add` refuses: RequestError, PolicyError, FormatError.
        """
        self.check_open()
        count = sum(r.params.n for r in requests)
        generation = Generation(requests, request_id, self._post_cancel, whole)
        with self._wake:
            self.check_room(count)
            self._post(lambda llm: self._accept(llm, generation), generation.refuse)
            self._in_system += count
        await generation.accepted()
        return generation

    async def call(self, function: Callable[[LLM], T]) -> T:
        """Run a function on the engine's thread, between two steps, and return what it returns or raise what it
        raises. Raises Unavailable or EngineDied when the thread has ended.
        """
        future: Future[T] = Future()

        def run(llm: LLM) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(llm))
                except Exception as error:
                    future.set_exception(error)

        def refuse(error: SiftKVError) -> None:
            if not future.done():
                future.set_exception(error)

        self._post(run, refuse)
        return await asyncio.wrap_future(future)

    async def inspect(self, request_id: str) -> dict[str, Any]:
        """What `siftkv.server.stats.inspect_request` says. Raises RequestError for an unknown id."""
        return await self.call(lambda llm: stats.inspect_request(llm, request_id))

    def snapshot(self) -> dict[str, Any]:
        """The latest result of `siftkv.server.stats.collect`; empty before the model is loaded."""
        self._asked_at = time.monotonic()
        return self._snapshot

    def _check_alive(self) -> None:
        if self.state == "failed":
            raise EngineDied(f"the engine has failed: {self.error}")
        if self.state == "stopped":
            raise Unavailable("the server is shutting down")

    def check_open(self) -> None:
        """Raise Unavailable or EngineDied unless requests are taken."""
        self._check_alive()
        if self.state == "draining":
            raise Unavailable("the server is shutting down: it takes no new requests")
        if self.state == "starting":
            raise Unavailable("the model is still being loaded: try again in a moment")

    def check_room(self, completions: int) -> None:
        """Raise QueueFull when so many more do not fit now, RequestError when they never will."""
        limit = self.llm.cache.spec.max_slots + self.max_queue
        if completions > limit:
            raise RequestError(
                f"n times the prompts makes {completions} completions: this server takes {limit} at a time"
            )
        if self._in_system + completions > limit:
            raise QueueFull(
                f"{self._in_system} completions run or wait and this server takes {limit}: try again later",
                self._ledger.seconds_to_wait(),
            )

    def _post(self, run: Callable[[LLM], None], refuse: Callable[[SiftKVError], None]) -> None:
        with self._wake:
            self._check_alive()
            self._inbox.append(_Command(run, refuse))
            self._wake.notify()

    def _post_cancel(self, generation: Generation) -> None:
        with suppress(EngineDied, Unavailable):  # then it has ended anyway
            self._post(lambda llm: self._left(self._ledger.cancel(llm, generation)), lambda _: None)

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            self._llm = self._load if isinstance(self._load, LLM) else self._load()
            self._collect(self._llm)
            self.on_ready()
        except BaseException as error:
            self._fail(error)
            self.on_load_failure()
            return
        if self.state == "starting":
            self.state = "ready"
        try:
            while self._turn(self._llm):
                pass
            self._end_all(Unavailable("the server is shutting down"), "stopped")
        except BaseException as error:
            _log.critical("the engine has failed", exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._end_all(EngineDied(f"the engine has failed: {error}"), "failed")

    def _turn(self, llm: LLM) -> bool:
        """What was asked for meanwhile, then a step; sleeps while there is neither. False at the end."""
        with self._wake:
            while not (self._inbox or self._stopping or llm.engine.has_work):
                self._wake.wait()
            if self._stopping:
                return False
        self._obey(llm)
        if llm.engine.has_work or llm.engine.failed:
            self._left(self._ledger.deliver(llm, llm.engine.step()))
        self._renew(llm)
        return True

    def _obey(self, llm: LLM) -> None:
        """Do what was posted. What is still in the inbox when the engine fails is refused there."""
        while self._inbox:
            command = self._inbox.popleft()
            try:
                command.run(llm)
            except BaseException as error:
                command.refuse(EngineDied(f"the engine has failed: {error}"))
                raise

    def _accept(self, llm: LLM, generation: Generation) -> None:
        """Add a generation's requests to the engine, all or none."""
        added: list[str] = []
        try:
            for request_id, request in zip(generation.ids, generation.requests, strict=True):
                llm.engine.add(request.prompt_ids, request.params, request.policy, request.prompt, request_id)
                added.append(request_id)
                for sequence in llm.engine.sequences(request_id):
                    sequence.arrival = generation.arrived
        except Exception as error:
            for request_id in added:
                llm.engine.abort(request_id)
                llm.engine.forget(request_id)
            self._left(generation.completions)
            generation.refuse(error)
            return
        self._ledger.enter(generation)
        generation.accept()

    def _left(self, completions: int) -> None:
        with self._wake:
            self._in_system -= completions

    def _renew(self, llm: LLM) -> None:
        """Renew the snapshot where it is too old, or where it would stay as it is for long."""
        now = time.monotonic()
        wanted = now - self._asked_at < _ASKED_LATELY_SECONDS
        usual, share = (WANTED_SECONDS, ASKED_SHARE) if wanted else (USUAL_SECONDS, SNAPSHOT_SHARE)
        oldest = max(usual, self._snapshot_seconds / share)
        if not llm.engine.has_work or now - self._snapshot_at >= oldest:
            self._collect(llm)

    def _collect(self, llm: LLM) -> None:
        began = time.monotonic()
        try:
            self._snapshot = stats.collect(llm)
            self.metrics.step(self._snapshot)
        except Exception:
            _log.exception("collecting statistics failed")
        self._snapshot_at = time.monotonic()
        self._snapshot_seconds = self._snapshot_at - began

    def _end_all(self, error: Unavailable | EngineDied, state: State) -> None:
        """Tell everybody who waits; give pages back where the engine still can."""
        with self._wake:
            self.state = state
            commands = list(self._inbox)
            self._inbox.clear()
            self._in_system = 0
        self._ledger.end_all(self._llm if state == "stopped" else None, error)
        for command in commands:
            command.refuse(error)
