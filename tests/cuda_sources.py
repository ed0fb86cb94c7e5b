"""Sources of the CUDA kernels as caches of many kinds have them compiled, made without a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from siftkv.cache import CacheSpec, KVCache, build_conditioning
from siftkv.cache.page_size import choose_page_bytes
from siftkv.formats import Tier, TierFormat
from siftkv.kernels import reference
from siftkv.kernels.cuda.plan import Plan
from siftkv.kernels.state import CacheState, SelectionRule

# Modules by name: some of the package's functions are called as they are.
elementwise, importance, pages, rewrite, select, snapshot, worth = (
    importlib.import_module(f"siftkv.kernels.cuda.{name}")
    for name in ("elementwise", "importance", "pages", "rewrite", "select", "snapshot", "worth")
)
device = importlib.import_module("siftkv.kernels.cuda.device")
HEADS, GROUP = 2, 4


def cache(formats: tuple[str, ...], dim: int = 128, dtype: torch.dtype = torch.bfloat16, **options: Any) -> CacheState:
    """An empty cache on the CPU. options: `bias`, `mode` of conditioning, and what `CacheSpec` and `Tier` know."""
    bias, mode = options.pop("bias", False), options.pop("mode", "full")
    flags = {name: options.pop(name) for name in ("votes", "weights") if name in options}
    tiers = tuple(Tier(TierFormat.parse(name), **flags) for name in formats)
    size = choose_page_bytes(tiers, dim, gpu=True)
    spec = CacheSpec(2, HEADS, dim, dtype, tiers, 8, 1, 256, max_window=24, page_bytes=size, **options)
    angle = torch.arange(256)[:, None] * 10000.0 ** (-torch.arange(dim // 2) * 2 / dim)
    biases = [torch.arange(HEADS * dim).view(HEADS, dim) % 16 / 4 if bias else None] * 2
    c = build_conditioning(2, HEADS, dim, angle.cos(), angle.sin(), biases, [torch.ones(HEADS, dim)] * 2, mode)
    return KVCache(spec, c, reference).state  # type: ignore[arg-type]


def attention(formats: tuple[str, ...], group: int = GROUP, **options: Any) -> str:
    return Plan(cache(formats, **options), group).source()


def storing(formats: tuple[str, ...], **options: Any) -> str:
    """Sifting, appending and bookkeeping."""
    state = cache(formats, **options)
    c = state.conditioning
    constants = pages.cache_constants(state.layouts, state.window_k.dtype, c.rotates, c.has_bias)
    return "\n".join([*constants, pages.read_sources(pages._SOURCES)])


def rewriting(formats: tuple[str, ...], **options: Any) -> str:
    state = cache(formats, **options)
    c, sources = state.conditioning, tuple(reversed(range(len(formats))))
    rest = (c.rotates, c.has_bias, sources, state.skips)
    return str(rewrite.rewrite_source(state.layouts, state.window_k.dtype, *rest))


def selecting(metric: str, **options: Any) -> str | None:
    """None where the GPU has too little shared memory for it."""
    state = cache(("bf16", "k8v4"), query_rows=32, num_heads=HEADS * GROUP, votes=True, **options)
    rule = SelectionRule(0.9, metric, 7, True, 100, (1, 0))
    return str(select.select_source(state, rule)) if select.selects(state, rule) else None


def measuring(dim: int, dtype: torch.dtype) -> str:
    return str(importance.source(dtype, dim, GROUP))


def ranking(dim: int, dtype: torch.dtype) -> str:
    return str(worth.source(dtype, dim, GROUP, HEADS))


def fused(dtype: torch.dtype) -> str:
    return str(elementwise.source(dtype, elementwise.linear_stages(device.gpu_of(torch.device("cuda")))))


EVERY = {
    "attention, all options": lambda: attention(("bf16", "k8v4", "k4v2"), bias=True, weights=True, skips=True),
    "attention, sub-groups": lambda: attention(("fp16", "k4v4_g22", "k4v2_g24", "k4v1"), 16, dtype=torch.float16),
    "attention, head_dim 80": lambda: attention(("k8v4", "k4v4"), 1, dim=80, mode="none"),
    "attention, head_dim 256": lambda: attention(("bf16", "k2v4"), 2, dim=256),
    "storing, bias": lambda: storing(("bf16", "k8v4c", "k4v2_g24"), bias=True),
    "storing, fp16": lambda: storing(("k8v4", "k1v1"), dtype=torch.float16, dim=64),
    "rewriting": lambda: rewriting(("bf16", "k8v4"), bias=True, skips=True),
    "rewriting, dense": lambda: rewriting(("fp16",), dtype=torch.float16),
    "selecting, attention": lambda: selecting("attention", weights=True, bias=True),
    "selecting, snapkv": lambda: selecting("snapkv"),
    "selecting, accumulated": lambda: selecting("accumulated"),
    "copying": lambda: str(snapshot.source()),
    "measuring": lambda: measuring(128, torch.bfloat16),
    "measuring, head_dim 256": lambda: measuring(256, torch.float16),
    "ranking": lambda: ranking(128, torch.bfloat16),
    "ranking, head_dim 80": lambda: ranking(80, torch.float16),
    "fused, bf16": lambda: fused(torch.bfloat16),
    "fused, fp16": lambda: fused(torch.float16),
}
"""Every kernel of the package, with what changes its instructions."""

TYPICAL = {
    "attention": lambda: attention(("bf16", "k8v4", "k4v2")),
    "storing": lambda: storing(("k8v4", "k4v2")),
    "selecting": lambda: selecting("snapkv"),
    "ranking": EVERY["ranking"],
    "fused": EVERY["fused, bf16"],
}
