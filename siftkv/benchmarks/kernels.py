"""Speed of the GPU's decode attention, as a share of what the same card reads in the same run.

A case's bytes are what one call must read: codes and metadata of every token, window rows, and positions where a key
bias is added back. Its time is that of a whole call (three launches), replayed from a CUDA graph: the median over
replays. The ceiling is a plain sum over several gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from siftkv.cache import CacheSpec, KVCache, SlotRule, build_conditioning
from siftkv.cache.page_size import choose_page_bytes
from siftkv.errors import SiftKVError
from siftkv.formats import PageLayout, Tier, TierFormat
from siftkv.kernels import reference
from siftkv.kernels.cuda import decode_attention
from siftkv.kernels.reference.pages import pages_needed
from siftkv.kernels.state import CacheState

_WINDOW, _SINKS, _INTERVAL = 64, 4, 8
_REPLAYS = 30


@dataclass(frozen=True)
class KernelCase:
    """One layer's attention of `batch` requests.

    tiers: formats and the tokens that a head keeps in each. ragged: head lengths drawn evenly from 2/9 to 16/9 of that
    (1:8) instead of all alike.
    refresh: every request is due for a refresh of its scores. page_bytes: 0 = chosen as for any cache.
    pairs: rotary pairs a head whose constant conditioning took out of keys, in neighbouring channels or `apart`.
    gap: mean distance between positions of neighbouring tokens of a head: 1 = contiguous, 0 = in any order.
    """

    name: str
    tiers: tuple[tuple[str, int], ...]
    batch: int = 64
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    ragged: bool = False
    refresh: bool = False
    pairs: int = 0
    apart: bool = False
    gap: int = 1
    page_bytes: int = 0


def default_cases() -> list[KernelCase]:
    """The shapes of the project's figures."""
    k8v4, k4v2 = (("k8v4", 8192),), (("k4v2", 16384),)
    mixed = (("k4v4", 4096), ("k4v2", 8192))
    return [
        KernelCase("bf16 8k", (("bf16", 8192),)),
        KernelCase("k8v4 8k", k8v4),
        KernelCase("k4v4 8k", (("k4v4", 8192),)),
        KernelCase("k4v2 16k", k4v2),
        KernelCase("k4v4 4k + k4v2 8k", mixed),
        KernelCase("k8v4 2k + k4v2 8k", (("k8v4", 2048), ("k4v2", 8192))),
        KernelCase("k8v4 8k ragged", k8v4, ragged=True),
        KernelCase("k4v4 4k + k4v2 8k ragged", mixed, ragged=True),
        KernelCase("k8v4 8k group 7", k8v4, group=7),
        KernelCase("k8v4 8k group 8", k8v4, group=8),
        KernelCase("k8v4 16k head_dim 64", (("k8v4", 16384),), head_dim=64),
        KernelCase("k8v4 128k batch 1", (("k8v4", 131072),), batch=1),
        KernelCase("k8v4 8k refresh", k8v4, refresh=True),
        KernelCase("k8v4 512 + k4v2 1k", (("k8v4", 512), ("k4v2", 1024))),
        KernelCase("k8v4 8k, 8 pairs", k8v4, pairs=8),
        KernelCase("k8v4 8k, 16 pairs", k8v4, pairs=16),
        KernelCase("k8v4 8k, 16 pairs apart", k8v4, pairs=16, apart=True),
        KernelCase("k8v4 8k, 16 pairs, group 8", k8v4, pairs=16, group=8),
        KernelCase("k4v4 8k, 16 pairs", (("k4v4", 8192),), pairs=16),
        KernelCase("k4v4 4k + k4v2 8k, 16 pairs", mixed, pairs=16),
        KernelCase("k8v4 8k, 16 pairs, every 4th position", k8v4, pairs=16, gap=4),
        KernelCase("k8v4 8k, 16 pairs, every 16th position", k8v4, pairs=16, gap=16),
        KernelCase("k8v4 8k, 16 pairs, positions in any order", k8v4, pairs=16, gap=0),
    ]


def _conditioning(case: KernelCase, max_len: int, device: str) -> Any:
    half = case.head_dim // 2
    angle = torch.arange(max_len, device=device)[:, None] * 10000.0 ** (-torch.arange(half, device=device) / half)
    bias = torch.zeros(case.kv_heads, case.head_dim)
    bias[:, torch.arange(case.pairs) * (half // 16) if case.apart else torch.arange(half - case.pairs, half)] = 20.0
    spread = torch.ones(case.kv_heads, case.head_dim)
    return build_conditioning(
        1, case.kv_heads, case.head_dim, angle.cos(), angle.sin(), [bias if case.pairs else None], [spread]
    )


def empty_case(case: KernelCase, device: str = "cuda") -> tuple[CacheState, Tensor]:
    """A case's cache with one page, and how many tokens its heads shall keep: `[batch, 1, H, tiers]`."""
    tiers = tuple(
        Tier(TierFormat.parse(name), scores=name != "bf16", positions=name != "bf16") for name, _ in case.tiers
    )
    mean = torch.tensor([tokens for _, tokens in case.tiers])
    shape = (case.batch, 1, case.kv_heads, 1)
    factor = 2 / 9 + 14 / 9 * torch.rand(shape) if case.ragged else torch.ones(shape)
    lengths = (mean * factor).long()
    longest = int(lengths.sum(-1).max()) * max(1, case.gap) + _WINDOW + _SINKS + 1
    max_len = -(-longest // _INTERVAL) * _INTERVAL + 1
    page_bytes = case.page_bytes or choose_page_bytes(tiers, case.head_dim, gpu=True)
    small = CacheSpec(
        1, case.kv_heads, case.head_dim, torch.bfloat16, tiers, 1, case.batch, max_len, _WINDOW, _SINKS, page_bytes
    )
    return KVCache(small, _conditioning(case, max_len, device), reference).state, lengths


def build_case(case: KernelCase) -> tuple[CacheState, Tensor]:
    """A cache on the GPU whose pages hold random codes with sensible metadata, scattered over the pool; its slots."""
    state, lengths = empty_case(case)
    max_len = state.conditioning.cos.shape[0]
    held = pages_needed(state, lengths.to(state.lengths.device)).cpu()
    _fill_pages(state, held.sum((0, 1, 2)).tolist())
    _fill_tables(state, held)
    if case.pairs:
        _fill_positions(state, held, case.gap)
    rule = SlotRule(_WINDOW, _SINKS, torch.zeros(1), torch.zeros(1, dtype=torch.int64), _INTERVAL)
    state.lengths.copy_(lengths)
    state.window.fill_(rule.window)
    state.sinks.fill_(rule.sinks)
    state.seen.fill_(max_len - 1 if case.refresh else max_len - 2)
    state.refresh.fill_(rule.refresh)
    state.window_start.copy_(state.seen - _WINDOW)
    state.window_k.normal_()
    state.window_v.normal_()
    return state, torch.arange(case.batch, device="cuda")


def _fill_pages(state: CacheState, pages: list[int]) -> None:
    """Pages of each tier one after another: random bytes, metadata of values around -1 to 1."""
    state.pages = torch.randint(0, 256, (sum(pages), state.pages.shape[1]), dtype=torch.uint8, device="cuda")
    start = 0
    for layout, count in zip(state.layouts, pages, strict=True):
        mine = state.pages[start : start + count]
        start += count
        if layout.format.dense:
            mine.view(torch.bfloat16)[:] = torch.randn(
                count, layout.page_bytes // 2, dtype=torch.bfloat16, device="cuda"
            )
            continue
        fill_metadata(mine, layout)


def fill_metadata(pages: Tensor, layout: PageLayout) -> None:
    """Scales and zero-points of values around -1 to 1, and positions, into quantised pages."""
    fmt = layout.format
    for start, bits, groups in (
        (layout.offsets[1], fmt.key_bits, fmt.key_groups),
        (layout.offsets[3], fmt.value_bits, fmt.value_groups),
    ):
        count = layout.tokens * groups
        meta = torch.empty(len(pages), count, 2, device=pages.device)
        meta[..., 0] = (1.5 + torch.rand(len(pages), count, device=pages.device)) / (2**bits - 1)
        meta[..., 1] = -1.0
        pages[:, start : start + 4 * count] = meta.half().view(len(pages), -1).view(torch.uint8)
    if layout.tier.positions:
        position = torch.randint(0, 1024, (len(pages), layout.tokens), dtype=torch.int32, device=pages.device)
        pages[:, layout.offsets[5] : layout.offsets[5] + 4 * layout.tokens] = position.view(torch.uint8)


def _fill_tables(state: CacheState, held: Tensor) -> None:
    start = 0
    for tier in range(held.shape[-1]):
        count = held[..., tier]
        column = torch.arange(state.width)
        inside = column < count[..., None]
        ids = torch.full(inside.shape, -1, dtype=torch.int32)
        total = int(count.sum())
        ids[inside] = start + torch.randperm(total, dtype=torch.int32)
        start += total
        row = state.page_table[:, :, :, tier // 2]
        ids = ids.cuda() if tier % 2 == 0 else ids.cuda().flip(-1)
        row.copy_(torch.where(ids >= 0, ids, row))


def _fill_positions(state: CacheState, held: Tensor, gap: int) -> None:
    """Tiers of a head one after another: positions from 4 on, `gap` apart in the mean, or (0) any of them."""
    first = torch.full(held.shape[:3], _SINKS, device="cuda")
    for tier, layout in enumerate(state.layouts):
        many = held[..., tier].cuda()
        row = state.page_table[:, :, :, tier // 2]
        inside = torch.arange(state.width, device="cuda") < many[..., None]
        ids = (row if tier % 2 == 0 else row.flip(-1))[inside].long()
        index = torch.arange(state.width * layout.tokens, device="cuda").view(state.width, layout.tokens)
        position = first[..., None, None] + index * gap
        if gap != 1:
            position = position + torch.randint(0, max(1, gap), position.shape, device="cuda")
        if gap == 0:
            position = torch.randint(_SINKS, state.conditioning.cos.shape[0], position.shape, device="cuda")
        position = position.clamp(max=state.conditioning.cos.shape[0] - 1)[inside].int()
        start = layout.offsets[5]
        state.pages[ids, start : start + 4 * layout.tokens] = position.view(len(ids), -1).view(torch.uint8)
        first = first + many * layout.tokens * gap


def case_bytes(case: KernelCase, state: CacheState) -> int:
    """Bytes that one call must read."""
    total = case.batch * case.kv_heads * (_WINDOW + _SINKS + 1) * 4 * case.head_dim
    for tier, layout in enumerate(state.layouts):
        fmt = layout.format
        meta = 0 if fmt.dense else fmt.key_meta_bytes + fmt.value_meta_bytes + 4 * (case.pairs > 0)
        total += int(state.lengths[..., tier].sum()) * (layout.key_row + layout.value_row + meta)
    return total


def time_graph(call: Callable[[], object], least_ms: float = 1.0) -> float:
    """Median milliseconds of a call, replayed from a CUDA graph that holds as many calls as `least_ms` takes."""
    call()
    once = _replay(call, 1)
    calls = max(1, int(least_ms / once))
    return _replay(call, calls) / calls


def _replay(call: Callable[[], object], calls: int) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(median(times[3:]))


def read_ceiling(gigabytes: int = 6) -> float:
    """GB/s of the fastest plain sum over a large tensor, bf16 or fp32."""
    best = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.ones(gigabytes * 10**9 // dtype.itemsize, dtype=dtype, device="cuda")
        best = max(best, x.numel() * dtype.itemsize / time_graph(x.sum) / 1e6)
    return best


@dataclass(frozen=True)
class KernelRow:
    """One case's outcome. share: of the read ceiling."""

    name: str
    milliseconds: float
    gigabytes: float
    gigabytes_per_second: float
    share: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_case(case: KernelCase, ceiling: float) -> KernelRow:
    """Time one case. `ceiling` in GB/s."""
    state, slots = build_case(case)
    q = torch.randn(case.batch, case.kv_heads * case.group, case.head_dim, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(2, case.batch, case.kv_heads, case.head_dim, dtype=torch.bfloat16, device="cuda")
    milliseconds = time_graph(lambda: decode_attention(state, 0, slots, q, k, v))
    size = case_bytes(case, state) / 1e9
    speed = size / milliseconds * 1e3
    return KernelRow(case.name, milliseconds, size, speed, speed / ceiling)


def run_kernels(cases: list[KernelCase] | None = None) -> list[KernelRow]:
    """Rows of all cases, the read ceiling first. Raises SiftKVError where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SiftKVError("the kernel benchmark needs a CUDA device: on a CPU use `siftkv bench cpu`")
    ceiling = read_ceiling()
    rows = [KernelRow("read ceiling", 0.0, 0.0, ceiling, 1.0)]
    for case in cases or default_cases():
        rows.append(run_case(case, ceiling))
        torch.cuda.empty_cache()
    return rows
