"""What a server says of itself while it is under load: its memory, and for SiftKV its pages and their integrity."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any

import httpx

from siftkv.benchmarks.serve_load import Target

_RESIDENT = re.compile(r"^process_resident_memory_bytes (\S+)$", re.MULTILINE)
_SETTLE_SECONDS = 30.0


@dataclass(frozen=True)
class ServerState:
    """One look at a server. seconds: since the watch began. resident_bytes: of its process; live: completions that it
    still has; pages, integrity: of its cache. None where a server does not tell.
    """

    seconds: float
    resident_bytes: int | None = None
    live: int | None = None
    pages_free: int | None = None
    pages_total: int | None = None
    integrity_ok: bool | None = None


class Watch:
    """Looks at a server every `every` seconds while it is entered, and once at the end."""

    def __init__(self, target: Target, every: float = 5.0) -> None:
        self.states: list[ServerState] = []
        self._target, self._every = target, every
        self._began = time.perf_counter()

    async def __aenter__(self) -> Watch:
        self._client = self._target.client()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.states.append(await self._look())
        await self._client.aclose()

    async def settle(self) -> ServerState:
        """Wait until the server has nothing left to do, if it tells, and say how it stands then."""
        end = time.perf_counter() + _SETTLE_SECONDS
        while (state := await self._look()).live and time.perf_counter() < end:
            await asyncio.sleep(0.3)
        self.states.append(state)
        return state

    async def _run(self) -> None:
        while True:
            self.states.append(await self._look())
            await asyncio.sleep(self._every)

    async def _look(self) -> ServerState:
        found = ServerState(round(time.perf_counter() - self._began, 2), resident_bytes=await self._resident())
        snapshot = await self._snapshot()
        if "pages" not in snapshot:
            return found
        return ServerState(
            found.seconds,
            found.resident_bytes,
            sum(snapshot[name] for name in ("running", "waiting", "swapped")),
            snapshot["pages"]["free"],
            snapshot["pages"]["total"],
            snapshot["integrity"]["ok"],
        )

    async def _resident(self) -> int | None:
        try:
            found = _RESIDENT.search((await self._client.get("/metrics")).text)
        except httpx.HTTPError:
            return None
        return int(float(found[1])) if found else None

    async def _snapshot(self) -> dict[str, Any]:
        try:
            response = await self._client.get("/api/snapshot")
            found = response.json() if response.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def memory_growth(states: list[ServerState]) -> float | None:
    """Resident memory at the end by that after the first quarter of the watch; None where the server does not tell."""
    told = [s for s in states if s.resident_bytes]
    if len(told) < 4:
        return None
    after = next(s for s in told if s.seconds >= told[-1].seconds / 4)
    return told[-1].resident_bytes / after.resident_bytes  # type: ignore[operator]
