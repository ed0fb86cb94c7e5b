"""Moving a request's cache to host memory and back, bit for bit: what preemption costs is a copy of the sifted bytes,
not of the 16-bit ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.kernels.reference.pages import take_pages
from siftkv.kernels.state import SLOT_TENSORS, CacheState

_PART_BYTES = 128 << 20
"""Of pages that are copied at a time: on a GPU a part is gathered first, and memory beside the cache is short."""

_COPIED = tuple(name for name in SLOT_TENSORS if name != "page_table")


@dataclass(frozen=True)
class SwappedRequest:
    """All that one request had in the cache, in host memory.

    pages: uint8 `[n, page_bytes]`, in the order of `where`. where: bool `[L, H, ceil(T/2), width]`, table entries that
        held them.
    """

    pages: Tensor
    where: Tensor
    rest: dict[str, Tensor]

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def nbytes(self) -> int:
        """Host bytes that it takes."""
        return self.pages.numel() + sum(t.numel() * t.element_size() for t in (self.where, *self.rest.values()))


def swap_bytes(state: CacheState, slot: int) -> int:
    """Host bytes that `swap_out` of a request would take."""
    table = state.page_table[slot]
    rest = sum(getattr(state, name)[slot].numel() * getattr(state, name).element_size() for name in _COPIED)
    return int((table >= 0).sum()) * state.pages.shape[1] + table.numel() + rest


def swap_out(state: CacheState, slot: int) -> SwappedRequest:
    """Copy a request to host memory. The slot is left as it was: release it next."""
    table = state.page_table[slot]
    where = table >= 0
    rest = {name: getattr(state, name)[slot].cpu().clone() for name in _COPIED}
    return SwappedRequest(_to_host(state.pages, table[where].long()), where.cpu(), rest)


def _to_host(pages: Tensor, page: Tensor) -> Tensor:
    """Pages from a GPU into pinned memory, which PyTorch keeps for the next: several times as fast as plain memory."""
    host = torch.empty(len(page), pages.shape[1], dtype=pages.dtype, pin_memory=pages.is_cuda)
    for part, place in zip(*(x.split(_pages_at_once(pages)) for x in (page, host)), strict=True):
        place.copy_(pages[part])
    return host


def _pages_at_once(pages: Tensor) -> int:
    return max(1, _PART_BYTES // pages.shape[1])


def swap_in(state: CacheState, slot: int, swapped: SwappedRequest) -> None:
    """Put a request into a fresh slot. The caller made sure that its pages are free."""
    device = state.pages.device
    page = take_pages(state, torch.tensor([swapped.num_pages], device=device))
    for part, content in zip(*(x.split(_pages_at_once(state.pages)) for x in (page, swapped.pages)), strict=True):
        state.pages[part.long()] = content.to(device, non_blocking=True)
    state.page_table[slot][swapped.where.to(device)] = page
    for name, value in swapped.rest.items():
        getattr(state, name)[slot] = value.to(device)
