"""Prompt kernels on a GPU: importance of every token, and placing what a layer keeps into pages and the window."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache

import torch
from torch import Tensor

from siftkv.errors import FormatError
from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.driver import Kernel, Module
from siftkv.kernels.cuda.pages import THREADS, CacheArguments, CacheKernels, read_sources
from siftkv.kernels.state import CacheState

_IMPORTANCE_SOURCES = ("ptx.cuh", "importance.cuh", "importance.cu")
_WARPS = 4
_IMPORTANCE_THREADS = {"exponents": 32 * _WARPS, "combine": 256, "attention": 32 * _WARPS, "finish": 256}
_KEYS_A_PART = 1024
"""Keys that one block of the first pass sums over: small enough that long rows do not keep the others waiting."""

_ROWS_A_PART, _MOST_ROW_PARTS = 256, 8
_ROW_QUANTUM = 32

_APPEND_POINTERS = ("k", "v", "score", "position", "tier", "order", "counts", "starts", "tickets", "refused")
_STRIDES = (
    *("k_token", "k_head", "v_token", "v_head", "score_head", "score_token"),
    *("position_token", "tier_head", "tier_token"),
)
_IMPORTANCE_POINTERS = (
    *(
        "q",
        "k",
        "rows",
        "weight",
        "lse",
        "parts",
        "exponent",
        "padded_weight",
        "followers",
        "padded_rows",
        "sums",
        "out",
    ),
)
_SIZES = ("tokens", "heads", "count", "padded", "keys_a_part", "rows_a_part", "row_parts")


class _Append(ctypes.Structure):
    """`Append` of `src/append.cu`, field by field."""

    _fields_ = (
        ("cache", CacheArguments),
        *((name, ctypes.c_void_p) for name in _APPEND_POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int) for name in ("layer", "slot", "tokens")),
    )


class _Importance(ctypes.Structure):
    """`Importance` of `src/importance.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _IMPORTANCE_POINTERS),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "lse_head")),
        *((name, ctypes.c_int) for name in _SIZES),
    )


def write_window(
    state: CacheState, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor
) -> None:
    """Put tokens into the window: k, v `[n, H, D]`, score fp32 `[H, n]`, position int64 `[n]` (sinks or the most recent
    ones).
    """
    if not len(k):
        return
    held = CacheKernels.of(state)
    arguments, kept = _tokens(state, held, layer, slot, k, v, score, position)
    warps = THREADS["window"] // 32
    held.kernels["window"].launch((-(-len(k) * k.shape[1] // warps), 1), arguments)
    del kept


def append_tokens(
    state: CacheState, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor, tier: Tensor
) -> None:
    """Append tokens to the tiers of one layer, in the order given, as `siftkv.kernels.reference.append_tokens` does:
    k, v `[n, H, D]` plain keys, score fp32 `[H, n]`, position int64 `[n]`, tier int8 `[H, n]` (-1 = dropped).

    Nothing is read by the host. Where the free pages do not suffice nothing is kept, and `refused_layers` counts that.
    """
    if not len(k):
        return
    held, tier = CacheKernels.of(state), tier.to(torch.int8)
    arguments, kept = _tokens(state, held, layer, slot, k, v, score, position)
    tiers, heads = len(state.layouts), k.shape[1]
    work = {
        "tier": tier,
        "order": torch.empty(heads * tiers * len(k), dtype=torch.int32, device=k.device),
        "counts": held.buffer("counts", heads * tiers, torch.int32),
        "starts": held.buffer("starts", heads * tiers, torch.int32),
        "tickets": held.buffer("tickets", 1, torch.int32, zero=True),
        "refused": held.refused,
    }
    for name, tensor in work.items():
        setattr(arguments, name, tensor.data_ptr())
    arguments.tier_head, arguments.tier_token = tier.stride()
    most_pages = len(k) // min(layout.tokens for layout in state.layouts) + 2 * tiers
    held.kernels["list"].launch((heads, 1), arguments)
    held.kernels["place"].launch((most_pages, heads), arguments)
    del kept


def refused_layers(state: CacheState) -> Tensor:
    """How many calls of `append_tokens` kept nothing because free pages were short, int32 `[S]` on the device, since
    each slot was last released.
    """
    return CacheKernels.of(state).refused


def _tokens(
    state: CacheState, held: CacheKernels, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor
) -> tuple[_Append, tuple[Tensor, ...]]:
    """Arguments, and the tensors that they point into."""
    dtype = state.window_k.dtype
    k, v, score = _inner(k.to(dtype)), _inner(v.to(dtype)), score.float()
    arguments = _Append(held.arguments)
    for name, tensor in {"k": k, "v": v, "score": score, "position": position}.items():
        setattr(arguments, name, tensor.data_ptr())
    arguments.k_token, arguments.k_head = k.stride()[:2]
    arguments.v_token, arguments.v_head = v.stride()[:2]
    arguments.score_head, arguments.score_token = score.stride()
    arguments.position_token = position.stride(0)
    arguments.layer, arguments.slot, arguments.tokens = layer, slot, len(k)
    return arguments, (k, v, score, position)


def _inner(x: Tensor) -> Tensor:
    """Rows of 16-byte pieces; a view of a fused projection stays a view."""
    aligned = x.stride(-1) == 1 and not any(s % 8 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if aligned else x.contiguous()


@lru_cache(maxsize=16)
def _importance_kernels(dtype: torch.dtype, dim: int, group: int, device: torch.device) -> dict[str, Kernel]:
    scale = math.log2(math.e) / math.sqrt(dim)
    constants = [
        f"#define MODEL_BF16 {int(dtype == torch.bfloat16)}",
        f"constexpr int HEAD_DIM = {dim}, GROUP = {group};",
        f"constexpr float LOGIT_SCALE = {scale!r}f;",
    ]
    source = "\n".join([*constants, read_sources(_IMPORTANCE_SOURCES)])
    module = Module(compile_cubin(source, architecture(device)))
    return {name: module.kernel(name, threads) for name, threads in _IMPORTANCE_THREADS.items()}


def prompt_importance(q: Tensor, k: Tensor, rows: Tensor, weight: Tensor, lse: Tensor | None = None) -> Tensor:
    """Weighted mean attention that each token got from later query rows, maximum over the GQA group, as
    `siftkv.kernels.reference.prompt_importance` says: q `[N, Hq, D]` and k `[N, H, D]` bf16 or fp16 after RoPE, rows
    int64 `[M]` ascending, weight fp32 `[M]`. Returns fp32 `[H, N]`.

    lse: fp32 `[Hq, N]`, the natural logarithm of each row's sum of exponentials, where prompt attention has left it:
        saves the first of two passes over the keys. The matrix of attention is never held. Raises FormatError for
    another type or a head_dim that is above 256 or no multiple of 8.
    """
    tokens, heads, dim = k.shape
    if q.dtype != k.dtype or k.dtype not in (torch.bfloat16, torch.float16) or dim > 256 or dim % 8:
        raise FormatError(f"the GPU kernels measure bf16 or fp16 keys of head_dim up to 256, not {k.dtype} and {dim}")
    if not len(rows) or not tokens:
        return torch.zeros(heads, tokens, dtype=torch.float32, device=k.device)
    group = q.shape[1] // heads
    q, k, rows, weight = _inner(q), _inner(k), rows.contiguous(), weight.float().contiguous()
    given = {"q": q, "k": k, "rows": rows, "weight": weight}
    if lse is not None:
        given["lse"] = lse = lse if lse.stride(1) == 1 else lse.contiguous()
    padded = _round_up(len(rows), _ROW_QUANTUM)
    rows_a_part = max(_ROWS_A_PART, _round_up(-(-padded // _MOST_ROW_PARTS), _ROW_QUANTUM))
    sizes = (tokens, heads, len(rows), padded, _KEYS_A_PART, rows_a_part, -(-padded // rows_a_part))
    given |= _importance_work(sizes, group, k.device)
    arguments = _Importance(*(given[name].data_ptr() if name in given else None for name in _IMPORTANCE_POINTERS))
    arguments.q_token, arguments.q_head = q.stride()[:2]
    arguments.k_token, arguments.k_head = k.stride()[:2]
    arguments.lse_head = 0 if lse is None else lse.stride(0)
    for name, value in zip(_SIZES, sizes, strict=True):
        setattr(arguments, name, value)
    _launch_importance(_importance_kernels(k.dtype, dim, group, k.device), arguments, dim, group)
    return given["out"]


def _importance_work(sizes: tuple[int, ...], group: int, device: torch.device) -> dict[str, Tensor]:
    tokens, heads, count, padded, keys_a_part, _, row_parts = sizes

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return {
        "parts": empty(-(-tokens // keys_a_part), heads, count * group),
        "exponent": empty(heads, group, padded),
        "padded_weight": empty(padded),
        "followers": empty(padded),
        "padded_rows": empty(padded, dtype=torch.int32),
        "sums": empty(row_parts, heads, tokens),
        "out": empty(heads, tokens),
    }


def _launch_importance(kernels: dict[str, Kernel], a: _Importance, dim: int, group: int) -> None:
    held = _WARPS * (32 if dim <= 128 else 16)
    if not a.lse:
        kernels["exponents"].launch((-(-a.count * group // held), a.heads * -(-a.tokens // a.keys_a_part)), a)
    kernels["combine"].launch((1 + -(-a.padded * a.heads * group // 256), 1), a)
    kernels["attention"].launch((-(-a.tokens // held), a.heads * a.row_parts), a)
    kernels["finish"].launch((-(-a.heads * a.tokens // 256), 1), a)


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to
