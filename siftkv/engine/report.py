"""What a request's cache holds, in physical bytes and in entries."""

from __future__ import annotations

import torch

from siftkv.cache import KVCache
from siftkv.cache.accounting import request_bytes
from siftkv.engine.outputs import DROPPED, KVReport


def kv_report(cache: KVCache, slot: int, policy: str, earlier_peak: int = 0) -> KVReport:
    """Report on the request in `slot`: its pages, its window and its share of every side buffer are counted.

    earlier_peak: bytes that it held at most before it was prefilled again.
    """
    state, spec = cache.state, cache.spec
    slots = state.seen.new_tensor([slot])
    counts = torch.stack([state.seen[slot], state.sinks[slot], state.window_start[slot], state.peak_pages[slot]])
    # One copy to the host: a GPU may have many steps under way.
    numbers = torch.cat([counts, cache.pages_held(slots), state.lengths[slot].flatten().long()]).cpu()
    seen, sinks, window_start, peak, held = numbers[:5].tolist()
    stored = numbers[5:].view(state.lengths.shape[1:]) * (seen > 0)  # of a prompt that failed no token counts as seen
    in_window = min(seen, sinks) + max(0, seen - window_start)
    window = torch.full(stored.shape[:2], in_window)
    columns = torch.cat([stored, window[..., None], (seen - window - stored.sum(-1))[..., None]], -1)
    names = [*(tier.name for tier in spec.tiers), "window", DROPPED]
    physical, most = request_bytes(state, torch.tensor([held, peak])).tolist()
    return KVReport(
        policy=policy,
        tokens_seen=seen,
        physical_bytes=physical,
        peak_bytes=max(earlier_peak, physical, most),
        bf16_bytes=spec.bf16_bytes(seen),
        tokens_by_tier=dict(zip(names, columns.sum((0, 1)).tolist(), strict=True)),
        pages=held,
        per_head_tokens=columns.tolist(),
    )
