"""One HTTP request's completions on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from siftkv.engine.outputs import StreamChunk
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import SiftKVError
from siftkv.policies import Policy


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how to complete it."""

    prompt_ids: list[int]
    params: SamplingParams
    policy: Policy
    prompt: str | None = None


class ClientGone(SiftKVError):
    """The client closed its connection."""


Item = tuple[int, StreamChunk]
"""The place of a request in its generation, and what a step added to one of its completions."""


def merged(items: list[Item]) -> list[Item]:
    """The same items with one chunk a completion, which holds all that came for it."""
    if len(items) == 1:
        return items
    found: dict[tuple[int, int], StreamChunk] = {}
    for place, chunk in items:
        before = found.get((place, chunk.index))
        found[place, chunk.index] = chunk if before is None else _joined(before, chunk)
    return [(place, chunk) for (place, _), chunk in found.items()]


def _joined(first: StreamChunk, second: StreamChunk) -> StreamChunk:
    logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return replace(
        second,
        text=first.text + second.text,
        token_ids=[*first.token_ids, *second.token_ids],
        logprobs=logprobs or None,
    )


class Generation:
    """Requests that were submitted together. Made and read in one event loop; filled from the engine's thread.

    whole: only the chunks that end a completion are handed over.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        request_id: str,
        cancel: Callable[[Generation], None],
        whole: bool = False,
    ) -> None:
        self.requests = tuple(requests)
        self.ids = [request_id if i == 0 else f"{request_id}-{i}" for i in range(len(requests))]
        self.whole = whole
        self.completions = sum(request.params.n for request in requests)
        self.arrived = time.perf_counter()
        """When its times begin: the engine may take a step of many seconds before it looks at new requests."""
        self.loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._accepted: asyncio.Future[None] = self.loop.create_future()
        self._open = self.completions
        self._items: list[Item] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def accepted(self) -> None:
        """Wait until the engine has taken the requests; raises its reason when it does not."""
        try:
            await self._accepted
        except asyncio.CancelledError:
            self._cancel(self)
            raise

    async def batches(self) -> AsyncIterator[list[Item]]:
        """Everything that has come since the last time, until all completions have ended.

        Raises what ended a request early: NumericsError, OutOfPages, EngineDied, Unavailable or ClientGone.
        """
        while self._open:
            while not self._items and self._error is None:
                self._news.clear()
                await self._news.wait()
            if not self._items:
                assert self._error is not None
                raise self._error
            batch, self._items = self._items, []
            self._open -= sum(chunk.finish_reason is not None for _, chunk in batch)
            yield batch

    def cancel(self) -> None:
        """Have the engine drop what has not ended, before its next step. Does nothing when all has."""
        if self._open:
            self._cancel(self)

    def client_gone(self) -> None:
        """`cancel`, and whoever reads `batches` gets ClientGone."""
        self.cancel()
        self.take([], ClientGone("the client closed its connection"))

    def take(self, items: list[Item], error: Exception | None = None) -> None:
        """In the event loop: what came from the engine."""
        self._items += items
        self._error = self._error or error
        self._news.set()

    def accept(self) -> None:
        """From the engine's thread: the requests are queued."""
        call_in(self.loop, self._settle, None)

    def refuse(self, error: Exception) -> None:
        """From the engine's thread: they are not."""
        call_in(self.loop, self._settle, error)

    def _settle(self, error: Exception | None) -> None:
        if self._accepted.done():
            return
        if error is None:
            self._accepted.set_result(None)
        else:
            self._open = 0
            self._accepted.set_exception(error)


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in a loop from another thread; nothing happens when the loop has been closed."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
