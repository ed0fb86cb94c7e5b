"""What a request's cache holds, in physical bytes and in entries."""

from __future__ import annotations

import torch

from siftkv.cache import KVCache
from siftkv.engine.outputs import DROPPED, KVReport


def kv_report(cache: KVCache, slot: int, policy: str, earlier_peak: int = 0) -> KVReport:
    """Report on the request in `slot`: its pages, its window and its share of every side buffer are counted.

    earlier_peak: bytes that it held at most before it was prefilled again.
    """
    state, spec = cache.state, cache.spec
    seen = int(state.seen[slot])
    stored = state.lengths[slot].long() * (seen > 0)  # of a prompt that failed half-way no token counts as seen
    in_ring = max(0, seen - int(state.window_start[slot]))
    window = torch.full(stored.shape[:2], min(seen, int(state.sinks[slot])) + in_ring)
    dropped = seen - window - stored.sum(-1).cpu()
    columns = torch.cat([stored.cpu(), window[..., None], dropped[..., None]], -1)
    names = [*(tier.name for tier in spec.tiers), "window", DROPPED]
    slots = torch.tensor([slot], device=state.pages.device)
    held = int(cache.request_bytes(slots)[0])
    return KVReport(
        policy=policy,
        tokens_seen=seen,
        physical_bytes=held,
        peak_bytes=max(earlier_peak, held, int(cache.peak_bytes(slots)[0])),
        bf16_bytes=spec.bf16_bytes(seen),
        tokens_by_tier=dict(zip(names, columns.sum((0, 1)).tolist(), strict=True)),
        pages=int(cache.pages_held(slots)[0]),
        per_head_tokens=columns.tolist(),
    )
