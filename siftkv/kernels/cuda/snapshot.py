"""What a selection reads of a request, copied, so that it can run beside decode steps."""

from __future__ import annotations

from dataclasses import replace

from siftkv.kernels.cuda.pages import CacheArguments, CacheKernels
from siftkv.kernels.state import SELECTION_TENSORS, CacheState


def snapshot(state: CacheState, slot: int) -> CacheState:
    """The cache as `select` sees the request in `slot` now: `SELECTION_TENSORS` are copies, of one slot, everything
    else is `state`'s own. Of use for `select` with slot 0 alone.

    Nothing is read by the host; the current stream is used. Compiled kernels are shared.
    """
    own = {name: getattr(state, name)[slot : slot + 1].clone() for name in SELECTION_TENSORS}
    held = CacheKernels.of(state)
    arguments = CacheArguments.from_buffer_copy(held.arguments)
    for name, tensor in own.items():
        if name != "queries":  # which are an argument of their own
            setattr(arguments, "table" if name == "page_table" else name, tensor.data_ptr())
    shared = {"cuda_select": state.scratch.setdefault("cuda_select", {})}
    return replace(state, **own, scratch=shared | {"cuda_cache": replace(held, arguments=arguments)})
