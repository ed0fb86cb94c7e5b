"""`rewrite` on a GPU: what a selection keeps becomes contiguous, for all layers and heads of a request at once."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from siftkv.errors import FormatError
from siftkv.formats import PageLayout
from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.driver import Kernel, Module
from siftkv.kernels.cuda.pages import CacheArguments, CacheKernels, cache_constants, read_sources
from siftkv.kernels.state import CacheState

_SOURCES = ("ptx.cuh", "cache.cuh", "token.cuh", "rewrite.cu")
_THREADS = {"schedule": 512, "move": 512}
_APPENDED = 4096
"""Tokens a head that may have come since the selection; with more the rewrite is refused."""

_LARGEST_PAGE = 40 * 1024
"""Bytes of a page that is put together in shared memory."""

_POINTERS = ("page_skip", "keep", "tokens_at", "order", "counts", "bookings", "returned", "tickets", "done")


class _Rewrite(ctypes.Structure):
    """`Rewrite` of `src/rewrite.cu`, field by field."""

    _fields_ = (
        ("cache", CacheArguments),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in ("slot", "columns", "room")),
    )


def rewrite_source(
    layouts: tuple[PageLayout, ...],
    dtype: torch.dtype,
    rotates: bool,
    has_bias: bool,
    sources: tuple[int, ...],
    skips: bool,
) -> str:
    """The whole source, its constants first."""
    constants = [
        *cache_constants(layouts, dtype, rotates, has_bias),
        f"constexpr int TARGET = {sources[0]}, SKIPS = {int(skips)};",
        "#define EACH_SOURCE(X) " + " ".join(f"X({tier})" for tier in sources),
    ]
    return "\n".join([*constants, read_sources(_SOURCES)])


@lru_cache(maxsize=32)
def _compiled(
    layouts: tuple[PageLayout, ...],
    dtype: torch.dtype,
    rotates: bool,
    has_bias: bool,
    sources: tuple[int, ...],
    skips: bool,
    device: torch.device,
) -> dict[str, Kernel]:
    source = rewrite_source(layouts, dtype, rotates, has_bias, sources, skips)
    module = Module(compile_cubin(source, architecture(device)))
    return {name: module.kernel(name, threads) for name, threads in _THREADS.items()}


def rewrite(
    state: CacheState,
    slot: int,
    keep: Tensor,
    target: int,
    sources: tuple[int, ...] | None = None,
    tokens_at: Tensor | None = None,
) -> Tensor:
    """Make the tokens of `sources` that a selection keeps contiguous in tier `target`, in order of time, and return the
    pages that this frees: for all layers and heads of the request in `slot`.

    keep: uint8 `[L, H, n]`, per candidate in order of (source, index in it), as `Selection.keep`. sources: tiers of the
        pool in order of time; the first is `target`; None = `target` alone. tokens_at: int32 `[L, H, T]`, the lengths
        of all tiers that `keep` speaks of (None = now); tokens that came later are kept.
    A survivor that stands in `target` already is moved bit for bit, one of another source is decoded and encoded anew;
    positions, scores, votes and log-weights stay. Returns bool `[1]` on the device: false where free pages, or entries
    of the page table, did not suffice; then nothing has changed. In-place compaction of one tier always fits.

    Nothing is read by the host. Must be ordered with decode steps and other changes of the cache (one stream, or
    events). Raises FormatError for sources that do not begin with `target`, or when a dense tier is to take in others.
    """
    sources = (target,) if sources is None else sources
    layout = state.layouts[target]
    if sources[0] != target:
        raise FormatError(f"a rewrite into tier {target} needs it first among its sources, not {sources}")
    if layout.format.dense and len(sources) > 1:
        raise FormatError(f"tier {layout.format.name} is dense: a rewrite compacts it alone, without {sources[1:]}")
    if layout.page_bytes > _LARGEST_PAGE:
        raise FormatError(f"pages of {layout.page_bytes} bytes are too large to rewrite: use smaller page_bytes")
    held, c = CacheKernels.of(state), state.conditioning
    options = (c.rotates, c.has_bias, sources, state.skips, state.pages.device)
    kernels = _compiled(state.layouts, state.window_k.dtype, *options)
    work = _work(state, held, keep, tokens_at if tokens_at is not None else state.lengths[slot].clone())
    arguments = _Rewrite(held.arguments)
    for name in _POINTERS:
        setattr(arguments, name, work[name].data_ptr())
    columns = keep.shape[2]
    arguments.slot, arguments.columns, arguments.room = slot, columns, columns + _APPENDED
    head_slots = held.arguments.layers * held.arguments.heads
    kernels["schedule"].launch((head_slots, 1), arguments)
    kernels["move"].launch((head_slots, 1), arguments)
    return work["done"]


def _work(state: CacheState, held: CacheKernels, keep: Tensor, tokens_at: Tensor) -> dict[str, Tensor]:
    layers, heads, columns = keep.shape

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=keep.device)

    return {
        "page_skip": state.page_skip,
        "keep": keep.contiguous(),
        "tokens_at": tokens_at.contiguous(),
        "order": empty(layers, heads, columns + _APPENDED, dtype=torch.int32),
        "counts": empty(layers, heads, dtype=torch.int32),
        "bookings": empty(layers, heads, 2, dtype=torch.int64),
        "returned": empty(1, dtype=torch.int64),
        "tickets": held.buffer("rewrite_tickets", 3, torch.int32, zero=True),
        "done": empty(1, dtype=torch.bool),
    }
