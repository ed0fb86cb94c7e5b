"""Moving the oldest tokens of a tier to the end of another, many at once: for formats that quantise tokens together.

As `siftkv.cache.compaction` plain PyTorch, a layer of a request at a time, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.errors import OutOfPages
from siftkv.kernels.reference.pages import extend_tier, return_pages
from siftkv.kernels.reference.quantize import decode, encode
from siftkv.kernels.reference.tokens import is_plain, page_of, read_records, write_records
from siftkv.kernels.state import CacheState, table_column


def move_oldest(state: CacheState, slot: int, source: int, target: int, count: int) -> None:
    """Move the first `count` tokens of the tier `source` of every head of every layer behind those of `target`.

    All heads hold at least so many there, in time order, and both tiers store plain keys. Raises OutOfPages before
    anything is changed.
    """
    assert is_plain(state.layouts[source]), "keys move as they are"
    assert is_plain(state.layouts[target]), "keys move as they are"
    length = state.lengths[slot, :, :, target].long()
    a_page = state.layouts[target].tokens
    more = int((-(-(length + count) // a_page) + -length // a_page).sum())
    if more > state.free_pages():
        raise OutOfPages(f"moving {count} tokens a head takes {more} more pages and {state.free_pages()} are free")
    for layer in range(state.lengths.shape[1]):
        _move(state, layer, slot, source, target, count)


def _move(state: CacheState, layer: int, slot: int, source: int, target: int, count: int) -> None:
    length = state.lengths[slot, layer, :, source].long()  # the same in every head
    held = _records(state, layer, slot, source, torch.arange(int(length[0]), device=length.device))
    k, v, score, position = decode(state.layouts[source], held[:, :count])
    moved = encode(state.layouts[target], k, v, score, position)
    _shrink(state, layer, slot, source, length - count)
    _put(state, layer, slot, source, 0, held[:, count:])
    start = int(state.lengths[slot, layer, 0, target])
    extend_tier(state, layer, slot, target, torch.full_like(length, count))
    _put(state, layer, slot, target, start, moved)


def _records(state: CacheState, layer: int, slot: int, tier: int, index: Tensor) -> Tensor:
    """uint8 `[H, n, token_bytes]` of the tokens `index` int64 `[n]` of every head."""
    table = state.page_table[slot, layer]
    index = index.expand(len(table), -1)
    return read_records(state, tier, page_of(state, table, tier, index), index)


def _put(state: CacheState, layer: int, slot: int, tier: int, start: int, record: Tensor) -> None:
    """Write records uint8 `[H, n, token_bytes]` from the `start`-th token of every head on."""
    table = state.page_table[slot, layer]
    index = torch.arange(start, start + record.shape[1], device=record.device).expand(len(table), -1)
    page = page_of(state, table, tier, index)
    write_records(state, tier, page.flatten(), index.flatten(), record.flatten(0, 1))


def _shrink(state: CacheState, layer: int, slot: int, tier: int, length: Tensor) -> None:
    """Cut a tier to `length` tokens a head, int64 `[H]`; pages that this empties return."""
    table = state.page_table[slot, layer, :, tier // 2]
    place = torch.arange(state.width, device=table.device)
    mine = torch.zeros_like(table, dtype=torch.bool)
    tokens = state.layouts[tier].tokens
    kept, held = -(-length // tokens), -(-state.lengths[slot, layer, :, tier].long() // tokens)
    mine[:, table_column(state.width, tier, place)] = (place >= kept[:, None]) & (place < held[:, None])
    return_pages(state, table[mine])
    table[mine] = -1
    state.lengths[slot, layer, :, tier] = length.to(torch.int32)
