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
    return report_of(cache, read_counts(cache, [slot])[0], policy, earlier_peak)


def read_counts(cache: KVCache, slots: list[int]) -> list[list[int]]:
    """What `report_of` needs to know of each request, in one copy to the host: a GPU may have many steps under way."""
    state, index = cache.state, cache.state.seen.new_tensor(slots)
    counts = torch.stack([x[index] for x in (state.seen, state.sinks, state.window_start, state.peak_pages)], 1)
    lengths = state.lengths[index].flatten(1).long()
    numbers: list[list[int]] = torch.cat([counts, cache.pages_held(index)[:, None], lengths], 1).tolist()
    return numbers


def report_of(cache: KVCache, numbers: list[int], policy: str, earlier_peak: int) -> KVReport:
    """The report from what `read_counts` found."""
    state, spec = cache.state, cache.spec
    seen, sinks, window_start, peak, held = numbers[:5]
    stored = torch.tensor(numbers[5:]).view(state.lengths.shape[1:])
    stored = stored * (seen > 0)  # of a prompt that failed no token counts as seen
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
