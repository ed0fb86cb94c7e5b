"""Several processes that send one load together: reading thousands of events a second keeps more than one CPU busy."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from siftkv.benchmarks.serve_load import Load, Outcome, Target, Work
from siftkv.errors import SiftKVError

_STARTING_SECONDS = 120.0


@dataclass(frozen=True)
class Open:
    """Requests that arrive at `times`, in seconds, whatever the server does."""

    times: Sequence[float]


@dataclass(frozen=True)
class Closed:
    """`clients` that never pause: all works once, or over and over until `seconds` have passed."""

    clients: int
    seconds: float | None = None


@dataclass(frozen=True)
class Fleet:
    """Who sends. processes: among which works, arrivals and clients are divided. cores: CPUs that they may use, empty =
    those of this process; Linux only.
    """

    processes: int = 1
    cores: tuple[int, ...] = ()

    async def send(self, target: Target, works: Sequence[Work], how: Open | Closed) -> list[Outcome]:
        """What became of each request, in the order of sending. Raises SiftKVError when a process fails."""
        count = min(self.processes, len(works), how.clients if isinstance(how, Closed) else len(works))
        if count <= 1 and not self.cores:
            return await _load(target, works, how)
        return await asyncio.to_thread(self._send, target, works, how, max(1, count))

    def _send(self, target: Target, works: Sequence[Work], how: Open | Closed, count: int) -> list[Outcome]:
        context = multiprocessing.get_context("spawn")
        barrier, answers = context.Barrier(count), context.Queue()
        processes = []
        for i in range(count):
            part = Open(how.times[i::count]) if isinstance(how, Open) else _share(how, i, count)
            arguments = (target, works[i::count], part, self.cores, barrier, answers)
            processes.append(context.Process(target=_run, args=arguments, daemon=True))
            processes[-1].start()
        told = [answers.get() for _ in processes]
        for process in processes:
            process.join()
        failed = next((part for part in told if isinstance(part, str)), None)
        if failed is not None:
            raise SiftKVError(f"a process that sends requests failed: {failed}")
        return sorted((outcome for part in told for outcome in part), key=lambda outcome: outcome.started)


def _share(how: Closed, place: int, count: int) -> Closed:
    return Closed(len(range(place, how.clients, count)), how.seconds)


async def _load(
    target: Target, works: Sequence[Work], how: Open | Closed, barrier: Barrier | None = None
) -> list[Outcome]:
    async with Load(target) as load:
        if barrier is not None:
            await asyncio.to_thread(barrier.wait, _STARTING_SECONDS)
        if isinstance(how, Open):
            return await load.open_loop(works, how.times)
        return await load.closed_loop(works, how.clients, how.seconds)


def _run(
    target: Target,
    works: Sequence[Work],
    how: Open | Closed,
    cores: tuple[int, ...],
    barrier: Barrier,
    answers: Queue[list[Outcome] | str],
) -> None:
    try:
        if cores:
            os.sched_setaffinity(0, cores)
        answers.put(asyncio.run(_load(target, works, how, barrier)))
    except Exception as error:  # whoever waits for an answer must get one
        answers.put(f"{type(error).__name__}: {error}")
