"""What a decode step notes about its requests besides where tokens live: faults, and the most pages held."""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.kernels.reference.pages import pages_needed
from siftkv.kernels.state import CacheState, window_row


def note_faults(state: CacheState, slots: Tensor) -> None:
    """Set `not_finite` of the requests in `slots` (int64 `[B]`) whose newest key or value, at position `seen`, is NaN
    or infinite in any layer.
    """
    row = window_row(state, state.seen[slots], state.sinks[slots])
    newest = torch.stack([state.window_k[slots, :, :, row], state.window_v[slots, :, :, row]])
    state.not_finite[slots] |= ~torch.isfinite(newest).flatten(2).all(-1).all(0)


def note_peaks(state: CacheState, slots: Tensor) -> None:
    """Raise `peak_pages` of the requests in `slots` to what they hold now."""
    held = pages_needed(state, state.lengths[slots]).flatten(1).sum(1)
    state.peak_pages[slots] = torch.maximum(state.peak_pages[slots], held)
