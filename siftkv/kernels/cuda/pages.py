"""The kernels that move tokens and pages: what they are compiled for, their view of a cache, and `release`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from siftkv.errors import FormatError
from siftkv.formats import PageLayout
from siftkv.kernels.cuda.attention import hadamard_signs
from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.driver import Kernel, Module
from siftkv.kernels.cuda.plan import TierPlan
from siftkv.kernels.state import CacheState

_SOURCES = ("ptx.cuh", "cache.cuh", "token.cuh", "sift.cu", "append.cu", "pages.cu")
_RETURN_WARPS = 4
THREADS = {
    "plan": 128,
    "coordinate": 256,
    "commit": 128,
    "list": 512,
    "place": 256,
    "count_pages": 1024,
    "return_pages": 32 * _RETURN_WARPS,
}
"""Threads a block of each kernel, as the sources say."""

_POINTERS = (
    *("pages", "free_ring", "counters", "table", "lengths", "window_k", "window_v", "window_score"),
    *(
        "seen",
        "window_start",
        "sinks",
        "window",
        "catch_up",
        "alpha",
        "cap_share",
        "cap",
        "cos",
        "sin",
        "bias",
        "signs",
    ),
)


class CacheArguments(ctypes.Structure):
    """`Cache` of `src/cache.cuh`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("num_pages", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("layers", "heads", "width", "sink_rows", "ring_rows", "positions")),
    )


class _Release(ctypes.Structure):
    _fields_ = (
        ("cache", CacheArguments),
        ("slots", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("refused", ctypes.c_void_p),
        ("batch", ctypes.c_int),
    )


def read_sources(names: tuple[str, ...]) -> str:
    """The named files of `src`, one after another."""
    folder = Path(__file__).parent / "src"
    return "\n".join((folder / name).read_text() for name in names)


def cache_constants(layouts: tuple[PageLayout, ...], dtype: torch.dtype, rotates: bool, has_bias: bool) -> list[str]:
    """Source lines that say what `token.cuh` and `cache.cuh` are compiled for."""
    dim = layouts[0].head_dim
    dense = [layout.format.dense for layout in layouts]
    values = {
        "HEAD_DIM": dim,
        "HADAMARD_BLOCK": dim & -dim if rotates else 1,
        "HAS_BIAS": int(has_bias),
        "PAGE_BYTES": layouts[0].page_bytes,
        "TIERS": len(layouts),
        "FIRST_QUANTISED": dense.index(False) if False in dense else len(layouts),
    }
    return [
        f"#define MODEL_BF16 {int(dtype == torch.bfloat16)}",
        *(f"constexpr int {name} = {value};" for name, value in values.items()),
        "template <int INDEX> struct Tier;",
        *(TierPlan(layout).constants(index) for index, layout in enumerate(layouts)),
        "#define EACH_TIER(X) " + " ".join(f"X({index})" for index in range(len(layouts))),
    ]


@lru_cache(maxsize=16)
def _compiled(
    layouts: tuple[PageLayout, ...], dtype: torch.dtype, rotates: bool, has_bias: bool, device: torch.device
) -> tuple[Module, dict[str, Kernel]]:
    constants = cache_constants(layouts, dtype, rotates, has_bias)
    module = Module(compile_cubin("\n".join([*constants, read_sources(_SOURCES)]), architecture(device)))
    return module, {name: module.kernel(name, threads) for name, threads in THREADS.items()}


def _check(state: CacheState) -> None:
    dtype = state.window_k.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise FormatError(
            "the GPU kernels need a bf16 or fp16 model: load it with dtype='bfloat16', or use kernels='reference'"
        )
    if state.pages.shape[1] % 16:
        raise FormatError("the GPU kernels need page_bytes to be a multiple of 16")
    own = "bf16" if dtype == torch.bfloat16 else "fp16"
    other = [x.format.name for x in state.layouts if x.format.dense and x.format.name != own]
    if other:
        raise FormatError(f"the GPU kernels keep dense pages in the model's own type, {own}, not {other[0]}")


@dataclass
class CacheKernels:
    """Compiled kernels of one cache, its arguments, and work space that launches hand to each other.

    refused: see `siftkv.kernels.cuda.append.refused_layers`.
    """

    kernels: dict[str, Kernel]
    module: Module
    arguments: CacheArguments
    signs: Tensor
    refused: Tensor
    work: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(state: CacheState) -> CacheKernels:
        """The cache's own; the first call compiles (seconds, once a machine). Raises FormatError for what the kernels
        cannot read.
        """
        held: CacheKernels | None = state.scratch.get("cuda_cache")
        if held is None:
            _check(state)
            c = state.conditioning
            module, kernels = _compiled(state.layouts, state.window_k.dtype, c.rotates, c.has_bias, state.pages.device)
            signs = hadamard_signs(c) if c.rotates else torch.ones(0, device=state.pages.device)
            refused = torch.zeros(len(state.seen), dtype=torch.int32, device=state.pages.device)
            held = CacheKernels(kernels, module, _arguments(state, signs), signs, refused)
            state.scratch["cuda_cache"] = held
        return held

    def buffer(self, name: str, size: int, dtype: torch.dtype, zero: bool = False) -> Tensor:
        """Work space of at least `size` elements, kept; zero once if `zero`, after that what kernels leave there."""
        held = self.work.get(name)
        if held is None or held.numel() < size:
            make = torch.zeros if zero else torch.empty
            held = self.work[name] = make(size, dtype=dtype, device=self.signs.device)
        return held


def _arguments(state: CacheState, signs: Tensor) -> CacheArguments:
    c, own = state.conditioning, {"table": state.page_table, "signs": signs}
    shared = {"cos": c.cos, "sin": c.sin, "bias": c.bias}
    arguments = CacheArguments()
    for name in _POINTERS:
        tensor = own.get(name, shared.get(name))
        tensor = getattr(state, name) if tensor is None else tensor
        assert tensor.is_contiguous(), name
        setattr(arguments, name, tensor.data_ptr())
    _, arguments.layers, arguments.heads, _ = state.lengths.shape
    arguments.num_pages, arguments.width = state.num_pages, state.width
    arguments.sink_rows, arguments.ring_rows = state.sink_rows, state.ring_rows
    arguments.positions = c.cos.shape[0]
    return arguments


def release(state: CacheState, slots: Tensor) -> None:
    """Give back every page of the requests in `slots` (int64 `[B]`, distinct, on the device) and empty their tables and
    lengths.
    """
    if not len(slots):
        return
    held, slots = CacheKernels.of(state), slots.contiguous()
    head_slots = len(slots) * held.arguments.layers * held.arguments.heads
    most = state.lengths[..., 0].numel()
    places = held.buffer("places", most, torch.int64)
    arguments = _Release(held.arguments, slots.data_ptr(), places.data_ptr(), held.refused.data_ptr(), len(slots))
    held.kernels["count_pages"].launch((1, 1), arguments)
    held.kernels["return_pages"].launch((-(-head_slots // _RETURN_WARPS), 1), arguments)
