"""From the engine's thread into an event loop: what steps gave, in as few calls as the clients will not notice."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from siftkv.server.generation import Generation, Item, call_in

REST_SECONDS = 0.0002
"""Least time between two deliveries, for each generation that the first one went to. Waking a generation and writing to
its connection takes a quarter of that, in a thread that shares the interpreter with the engine's: with 200 streams and
steps of 10 ms the engine would wait for the loop most of the time. So many streams get four tokens at a time.
"""


@dataclass
class Parcel:
    """What came for one generation, and what ended it early."""

    items: list[Item] = field(default_factory=list)
    error: Exception | None = None


Load = dict[Generation, Parcel]


class Courier:
    """Carries parcels into one event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[Load] = deque()
        self._called = False
        self._next = 0.0

    def send(self, load: Load) -> None:
        """From the engine's thread."""
        self._waiting.append(load)
        if not self._called:
            self._called = True
            call_in(self._loop, self._plan)

    def _plan(self) -> None:
        rest = self._next - self._loop.time()
        if rest > 0:
            self._loop.call_later(rest, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        self._called = False  # before the last look: what comes after it calls again
        reached: set[Generation] = set()
        while self._waiting:
            for generation, parcel in self._waiting.popleft().items():
                generation.take(parcel.items, parcel.error)
                reached.add(generation)
        self._next = self._loop.time() + REST_SECONDS * len(reached)


class Couriers:
    """A courier for each event loop."""

    def __init__(self) -> None:
        self._known: dict[asyncio.AbstractEventLoop, Courier] = {}

    def send(self, load: Load) -> None:
        """From the engine's thread: hand each generation its parcel."""
        loops: dict[asyncio.AbstractEventLoop, Load] = {}
        for generation, parcel in load.items():
            loops.setdefault(generation.loop, {})[generation] = parcel
        for loop, part in loops.items():
            if loop not in self._known:
                self._known = {old: courier for old, courier in self._known.items() if not old.is_closed()}
                self._known[loop] = Courier(loop)
            self._known[loop].send(part)
