"""The tensors of a new cache, all of them allocated at once."""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.cache.spec import CacheSpec
from siftkv.kernels.state import UNLIMITED, CacheState, Conditioning


def empty_state(spec: CacheSpec, conditioning: Conditioning) -> CacheState:
    """A cache without requests, on the device of `conditioning`."""
    device = conditioning.cos.device
    slots, layers, heads, tiers = spec.all_slots, spec.num_layers, spec.num_kv_heads, len(spec.tiers)
    rows = spec.sink_rows + spec.ring_rows

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return CacheState(
        layouts=spec.layouts,
        sink_rows=spec.sink_rows,
        pages=zeros(spec.num_pages, spec.page_bytes, dtype=torch.uint8),
        free_ring=torch.arange(spec.num_pages, dtype=torch.int32, device=device),
        counters=torch.tensor([0, spec.num_pages], device=device),
        page_table=torch.full(
            (slots, layers, heads, -(-tiers // 2), spec.table_width), -1, dtype=torch.int32, device=device
        ),
        lengths=zeros(slots, layers, heads, tiers, dtype=torch.int32),
        window_k=zeros(slots, layers, heads, rows, spec.head_dim, dtype=spec.dtype),
        window_v=zeros(slots, layers, heads, rows, spec.head_dim, dtype=spec.dtype),
        window_score=zeros(slots, layers, heads, rows, dtype=torch.float32),
        seen=zeros(slots, dtype=torch.int64),
        window_start=zeros(slots, dtype=torch.int64),
        sinks=zeros(slots, dtype=torch.int64),
        window=zeros(slots, dtype=torch.int64),
        refresh=zeros(slots, dtype=torch.int64),
        catch_up=zeros(slots, dtype=torch.int64),
        alpha=zeros(slots, layers, heads, tiers, dtype=torch.float32),
        cap=zeros(slots, layers, heads, tiers, dtype=torch.int32),
        cap_share=torch.full((slots, layers, heads, tiers), torch.inf, device=device),
        horizon=torch.full((slots,), UNLIMITED, device=device),
        not_finite=zeros(slots, dtype=torch.bool),
        peak_pages=zeros(slots, dtype=torch.int64),
        queries=zeros(slots, layers, spec.query_rows, spec.num_heads, spec.head_dim, dtype=spec.dtype),
        page_skip=zeros(slots, layers, heads, -(-tiers // 2), spec.table_width if spec.skips else 0, dtype=torch.uint8),
        conditioning=conditioning,
        padding_slot=spec.max_slots if spec.padding_slots else -1,
    )
