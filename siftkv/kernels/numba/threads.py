"""Threads for compiled kernels: a kernel is a queue of items that every thread drains, so helpers that come late cost
nothing.

Python threads that release the GIL, not numba's own layer: that one costs a second compilation of every kernel, and
its default on Linux ends the
process if two threads enter it at once.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from numba.core import types

from siftkv.kernels.numba.compile import inner
from siftkv.kernels.numba.vectors import fetch_add

TAKEN, FINISHED = 0, 1
"""Elements of a job's progress (int64 `[2]`): items that were taken from the queue, items that were finished."""

_SPINS = 2000
"""Looks at the progress, about 10 microseconds, before the CPU is offered to others."""

_give_way = types.ExternalFunction("sched_yield" if os.name == "posix" else "SwitchToThread", types.int32())

_tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
_helpers: list[threading.Thread] = []
_starting = threading.Lock()


def workers(items: int) -> int:
    """Threads for a job: as many as PyTorch uses, and no more than it has items."""
    return max(1, min(torch.get_num_threads(), items))


def run(kernel: Callable[..., None], count: int, *args: Any) -> None:
    """Call `kernel(worker, *args)` on `count` threads, this one included (worker 0), and return when this one is done.

    The kernel takes items with `next_item`, reports them with `finish_item` and ends with `wait_for_others`; then
    nothing that a helper still does
    touches the arguments' content.
    """
    if count > 1:
        _start(count - 1)
        # Helpers that did not come for earlier tasks would not come in time for these either.
        if _tasks.empty():
            for worker in range(1, count):
                _tasks.put((kernel, (worker, *args)))
    kernel(0, *args)


@inner
def next_item(progress, items):
    """The next item of the queue, -1 when it is empty."""
    index = fetch_add(progress, TAKEN, 1)
    return index if index < items else -1


@inner
def finish_item(progress):
    """Report one taken item as done."""
    fetch_add(progress, FINISHED, 1)


@inner
def wait_for_others(worker, progress, items):
    """Worker 0 waits for the items that helpers are still at, at most one each; on a busy machine it lets them run."""
    spins = 0
    while worker == 0 and fetch_add(progress, FINISHED, 0) < items:
        spins += 1
        if spins > _SPINS:
            _give_way()


def _start(count: int) -> None:
    with _starting:
        while len(_helpers) < count:
            helper = threading.Thread(target=_help, name=f"siftkv-kernel-{len(_helpers)}", daemon=True)
            _helpers.append(helper)
            helper.start()


def _help() -> None:
    while (task := _tasks.get()) is not None:
        kernel, args = task
        kernel(*args)
        del task, kernel, args


def _stop() -> None:
    """A helper that came back from a kernel while the interpreter shuts down would end the process with an error."""
    for _ in _helpers:
        _tasks.put(None)
    for helper in _helpers:
        helper.join()
    _helpers.clear()


def _after_fork() -> None:
    """A child has none of its parent's threads."""
    global _tasks, _starting
    _helpers.clear()
    _tasks, _starting = queue.SimpleQueue(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_stop)
