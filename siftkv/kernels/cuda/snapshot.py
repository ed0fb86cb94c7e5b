"""What a selection reads of a request, copied, so that it can run beside decode steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from siftkv.kernels.cuda.pages import CacheArguments, CacheKernels
from siftkv.kernels.state import SELECTION_TENSORS, CacheState


def snapshot(state: CacheState, slot: int) -> CacheState:
    """The cache as `select` sees the request in `slot` now: `SELECTION_TENSORS` are copies, of one slot, everything
    else is `state`'s own. Of use for `select` with slot 0 alone.

    Nothing is read by the host; the current stream is used. Compiled kernels are shared.
    """
    theirs = {name: getattr(state, name)[slot : slot + 1] for name in SELECTION_TENSORS}
    own: dict[str, Any] = {name: torch.empty_like(tensor) for name, tensor in theirs.items()}
    torch._foreach_copy_(_words(own), _words(theirs))
    held = CacheKernels.of(state)
    arguments = CacheArguments.from_buffer_copy(held.arguments)
    for name, tensor in own.items():
        if name != "queries":  # which are an argument of their own
            setattr(arguments, "table" if name == "page_table" else name, tensor.data_ptr())
    shared = {name: state.scratch.setdefault(name, {}) for name in ("cuda_select", "cuda_select_room")}
    return replace(state, **own, scratch=shared | {"cuda_cache": replace(held, arguments=arguments)})


def _words(tensors: dict[str, Tensor]) -> list[Tensor]:
    """As numbers of one type, which one launch copies."""
    return [tensor.view(-1).view(torch.int32) for tensor in tensors.values()]
