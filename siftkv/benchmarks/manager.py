"""The memory manager on the GPU against a multi-threaded one on the host, on the same trace of prompts, decode steps
and releases (the question of DiffKV's figure on its parallel page manager, arXiv 2412.03131).

Both do all of it: classing by score, handing pages out and taking them back, quantising, writing and moving tokens.
The host's is the compiled CPU body of the same operations, with as many threads as PyTorch uses, on a cache in host
memory; what moving its decisions to a GPU would take is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from siftkv.cache import CacheSpec, KVCache, SlotRule, build_conditioning
from siftkv.cache.page_size import choose_page_bytes
from siftkv.errors import SiftKVError
from siftkv.formats import Tier, TierFormat
from siftkv.kernels import get_kernels
from siftkv.kernels.prompts import PromptBatch
from siftkv.kernels.state import window_row

_TIERS = ("k8v4", "k4v2")
_WINDOW, _SINKS, _UNLIMITED = 64, 4, 1 << 30
_TOGETHER = 16
"""Prompts that are kept at a time."""

_SHARES = (0.3, 0.6)
"""Of a prompt's tokens, in the tiers; the rest is dropped."""


@dataclass(frozen=True)
class Trace:
    """`requests` prompts of `prompt` tokens, then `steps` decode steps of them all, then one release of all."""

    requests: int = 32
    prompt: int = 512
    steps: int = 32
    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class ManagerRow:
    """Milliseconds on one device: a prompt (all layers), a decode step of all requests, the release of all. pages: that
    were held before the release, tokens: that were kept.
    """

    device: str
    threads: int
    prompt_ms: float
    step_ms: float
    release_ms: float
    pages: int
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def open_cache(trace: Trace, device: str) -> KVCache:
    """A cache of the trace's shape, with room for all of it."""
    tiers = tuple(Tier(TierFormat.parse(name), scores=True, positions=True) for name in _TIERS)
    page_bytes = choose_page_bytes(tiers, trace.head_dim, gpu=True)
    max_len, half = trace.prompt + trace.steps + 2, trace.head_dim // 2
    angle = torch.arange(max_len)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    spread = [torch.ones(trace.kv_heads, trace.head_dim)] * trace.layers
    conditioning = build_conditioning(
        trace.layers,
        trace.kv_heads,
        trace.head_dim,
        angle.cos().to(device),
        angle.sin().to(device),
        [None] * trace.layers,
        spread,
    )
    spec = CacheSpec(
        num_layers=trace.layers,
        num_kv_heads=trace.kv_heads,
        head_dim=trace.head_dim,
        dtype=torch.bfloat16,
        tiers=tiers,
        num_pages=1,
        max_slots=trace.requests,
        max_len=max_len,
        max_window=_WINDOW,
        sink_rows=_SINKS,
        page_bytes=page_bytes,
    )
    pages = sum(-(-max_len // layout.tokens) + 1 for layout in spec.layouts) * spec.head_slots * trace.requests
    kernels = get_kernels("auto", device, torch.bfloat16)
    return KVCache(replace(spec, num_pages=pages), conditioning, kernels)


def run_trace(trace: Trace, device: str) -> ManagerRow:
    """Play the trace on `device` twice; the second time nothing is compiled, and no memory is touched for the first
    time.
    """
    cache = open_cache(trace, device)
    play(cache, trace)
    return play(cache, trace)


def play(cache: KVCache, trace: Trace) -> ManagerRow:
    """Play the trace on an empty cache and leave it empty."""
    device, generator = cache.state.pages.device, torch.Generator().manual_seed(0)
    alpha = torch.rand(trace.layers, trace.kv_heads, len(_TIERS), generator=generator) * 2
    rule = SlotRule(_WINDOW, _SINKS, alpha, torch.full(alpha.shape, _UNLIMITED), catch_up=1)
    slots = [cache.admit(rule) for _ in range(trace.requests)]
    groups = [slots[at : at + _TOGETHER] for at in range(0, len(slots), _TOGETHER)]
    prompt_ms = sum(_prompts_ms(cache, trace, group, generator) for group in groups) / trace.requests
    index = torch.tensor(slots, device=device)
    step_ms = sum(_step_ms(cache, index, generator) for _ in range(trace.steps)) / trace.steps
    cache.check_integrity()
    pages, tokens = int(cache.pages_held(index).sum()), int(cache.state.lengths[index].sum())
    release_ms = _clock(device, lambda: cache.release(slots))
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return ManagerRow(device.type, threads, prompt_ms, step_ms, release_ms, pages, tokens)


def _prompts_ms(cache: KVCache, trace: Trace, slots: list[int], generator: torch.Generator) -> float:
    """Keep some prompts in every layer."""
    device, heads, each = cache.state.pages.device, trace.kv_heads, [trace.prompt] * len(slots)
    middles, nothing = [cache.middle(slot, trace.prompt) for slot in slots], [None] * len(slots)
    batch = PromptBatch.of(slots, each, middles, nothing, device)
    shape = (batch.tokens, heads, trace.head_dim)
    k, v = (torch.randn(shape, generator=generator).bfloat16().to(device) for _ in range(2))
    draw = torch.rand(heads, batch.tokens, generator=generator)
    tier = torch.bucketize(draw, torch.tensor(_SHARES).cumsum(0)).to(torch.int8)
    tier[tier == len(_TIERS)] = -1
    score, tier = (torch.rand(draw.shape, generator=generator) ** 3 / trace.prompt).to(device), tier.to(device)

    def store() -> None:
        for layer in range(trace.layers):
            cache.kernels.store_prompts(cache.state, layer, batch, k, v, score, tier)

    taken = _clock(device, store)
    for failure in cache.finish_prompts(slots, each):
        if failure is not None:
            raise failure
    return taken


def _step_ms(cache: KVCache, slots: Tensor, generator: torch.Generator) -> float:
    """One token a request: its scores are drawn, then the policy step is timed."""
    state = cache.state
    row = window_row(state, state.window_start[slots], state.sinks[slots])
    shape = (len(slots), *state.window_score.shape[1:3])
    score = torch.rand(shape, generator=generator) ** 3 / (state.seen[slots].cpu()[:, None, None] + 1)
    state.window_score[slots, :, :, row] = score.to(state.window_score)
    return _clock(state.pages.device, lambda: cache.step(slots))


def _clock(device: torch.device, work: Callable[[], object]) -> float:
    """Milliseconds until the work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def run_manager(trace: Trace) -> tuple[ManagerRow, ManagerRow]:
    """The trace on the GPU and on the host. Raises SiftKVError where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SiftKVError("the manager benchmark compares a GPU with its host: it needs a CUDA device")
    return run_trace(trace, "cuda"), run_trace(trace, "cpu")
