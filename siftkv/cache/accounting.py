"""Physical bytes: pages, windows, tables and side buffers. Nothing is left out and nothing is nominal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from siftkv.kernels.state import SLOT_TENSORS, CacheState


@dataclass(frozen=True)
class CacheUsage:
    """Bytes of a whole cache.

    allocated: every tensor. pool: the pages. slots: windows, tables and rules of all request slots. shared: free ring,
        counters, rotary tables and conditioning. pages_total, pages_used: counts. page_bytes: of one page.
    workspace: what kernels have allocated beside it so far to pass results between launches; grows with use, and is not
        part of `allocated`.
    """

    allocated: int
    pool: int
    slots: int
    shared: int
    pages_total: int
    pages_used: int
    page_bytes: int
    workspace: int = 0

    @property
    def pages_free(self) -> int:
        return self.pages_total - self.pages_used


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def slot_bytes(state: CacheState) -> int:
    """Bytes of one request slot beside its pages: its window and its rows of every table."""
    tensors = state.tensors()
    return sum(_bytes(tensors[name]) for name in SLOT_TENSORS) // len(state.seen)


def request_bytes(state: CacheState, pages: Tensor) -> Tensor:
    """Physical bytes of requests that hold `pages` (int64 `[B]`) pages: those, their free-ring entries, and the slot's
    side buffers.
    """
    return pages * (state.pages.shape[1] + state.free_ring.element_size()) + slot_bytes(state)


def usage(state: CacheState) -> CacheUsage:
    """Physical bytes of the cache, from the tensors themselves."""
    tensors = state.tensors()
    total = sum(_bytes(t) for t in tensors.values())
    slots = sum(_bytes(tensors[name]) for name in SLOT_TENSORS)
    pool = _bytes(state.pages)
    return CacheUsage(
        allocated=total,
        pool=pool,
        slots=slots,
        shared=total - pool - slots,
        pages_total=state.num_pages,
        pages_used=state.num_pages - state.free_pages(),
        page_bytes=state.pages.shape[1],
        workspace=sum({id(t): _bytes(t) for t in _tensors_in(list(state.scratch.values()), 4)}.values()),
    )


def _tensors_in(held: Any, depth: int) -> Iterator[Tensor]:
    """Tensors in what kernels keep: in lists, dicts and objects of their own, a few levels deep."""
    if isinstance(held, Tensor):
        yield held
    elif depth:
        if isinstance(held, dict):
            inner: Iterable[Any] = held.values()
        elif isinstance(held, (list, tuple)):
            inner = held
        else:
            inner = (
                vars(held).values() if type(held).__module__.startswith("siftkv.") and hasattr(held, "__dict__") else ()
            )
        for value in inner:
            yield from _tensors_in(value, depth - 1)
