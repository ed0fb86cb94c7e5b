"""Importance of every token of a batch of prompts."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from siftkv.errors import FormatError
from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.driver import Kernel, Module
from siftkv.kernels.cuda.pages import read_sources
from siftkv.kernels.cuda.worklist import aligned_rows, blocks_of, on_device
from siftkv.kernels.prompts import PromptBatch

_SOURCES = ("ptx.cuh", "importance.cuh", "importance.cu")
_WARPS, FINISH_THREADS = 4, 256
THREADS = {
    "pad": FINISH_THREADS,
    "exponents": 32 * _WARPS,
    "combine": FINISH_THREADS,
    "attention": 32 * _WARPS,
    "finish": FINISH_THREADS,
}
_KEYS_A_PART = 1024
"""Keys that one block of the first pass sums over: small enough that long rows do not keep the others waiting."""

_ROWS_A_PART, _MOST_ROW_PARTS = 256, 8
_ROW_QUANTUM = 32

_POINTERS = (
    *("q", "k", "rows", "weight", "lse", "prompts", "owners", "exponents_work", "attention_work", "finish_work"),
    *("parts", "exponent", "padded_weight", "followers", "padded_rows", "sums", "out"),
)
_STRIDES = ("q_token", "q_head", "k_token", "k_head", "lse_head")


class Importance(ctypes.Structure):
    """`Importance` of `src/importance.cuh`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "padded", "keys_a_part")),
    )


@dataclass(frozen=True)
class _Sizes:
    """How the work of one prompt of `length` tokens and `count` measured rows is cut, which depends on nothing else: a
    prompt gets the same sums alone and in a batch.
    """

    length: int
    count: int
    pairs_a_row: int
    held: int

    @property
    def padded(self) -> int:
        return _round_up(self.count, _ROW_QUANTUM)

    @property
    def rows_a_part(self) -> int:
        parts = min(max(1, _ceil(self.padded, _ROWS_A_PART)), _MOST_ROW_PARTS)
        return _round_up(_ceil(self.padded, parts), _ROW_QUANTUM)

    @property
    def row_parts(self) -> int:
        return _ceil(self.padded, self.rows_a_part) if self.count else 0

    @property
    def key_parts(self) -> int:
        return _ceil(self.length, _KEYS_A_PART) if self.count else 0

    @property
    def key_tiles(self) -> int:
        return _ceil(self.length, self.held)

    @property
    def pair_tiles(self) -> int:
        return _ceil(self.count * self.pairs_a_row, self.held)


@dataclass
class Plan:
    """What is the same in every layer: arguments, grids and work space. parts: elements of the one that rows take whose
    sums nobody knows, hundreds of MiB for a long prompt; made when it is needed.
    """

    kernels: dict[str, Kernel]
    arguments: Importance
    grids: dict[str, tuple[int, int]]
    kept: tuple[Tensor, ...]
    parts: int

    @staticmethod
    def of(
        batch: PromptBatch, heads: int, group: int, dim: int, kernels: dict[str, Kernel], lags: Sequence[int] = ()
    ) -> Plan:
        """lags: of each prompt, by how many positions more than one its rows follow the keys that they count for."""
        device, held = batch.table.device, _WARPS * (32 if dim <= 128 else 16)
        counts = [end - start for start, end in zip(batch.row_starts, batch.row_starts[1:], strict=False)]
        sizes = [_Sizes(n, m, group, held) for n, m in zip(batch.lengths, counts, strict=True)]
        padded = (0, *accumulate(s.padded for s in sizes))
        parts = (0, *accumulate(s.key_parts * s.count for s in sizes))
        sums = (0, *accumulate(s.row_parts * s.length for s in sizes))
        records = [
            x
            for b, (s, lag) in enumerate(zip(sizes, lags or [0] * len(sizes), strict=True))
            for x in (*_record(s, batch, b, padded[b], parts[b], sums[b]), lag, 0, 0, 0)
        ]
        work = {
            "exponents_work": blocks_of(s.pair_tiles * s.key_parts for s in sizes),
            "attention_work": blocks_of(s.key_tiles * s.row_parts for s in sizes),
            "finish_work": blocks_of(_ceil(n, FINISH_THREADS) for n in batch.lengths),
        }
        owners = [b for b, s in enumerate(sizes) for _ in range(s.padded // _ROW_QUANTUM)]
        tables, addresses = on_device({"prompts": records, "owners": owners} | work, device)
        space, spaces = _work_space(
            {
                "exponent": padded[-1] * heads * group,
                "sums": sums[-1] * heads,
                **dict.fromkeys(("padded_weight", "followers", "padded_rows"), padded[-1]),
            },
            device,
        )
        weight = batch.weight.float().contiguous()
        rows = batch.rows.contiguous()
        given = addresses | spaces | {"rows": rows.data_ptr(), "weight": weight.data_ptr()}
        arguments = Importance(*(given.get(name) for name in _POINTERS))
        arguments.tokens, arguments.heads, arguments.padded = batch.tokens, heads, padded[-1]
        arguments.keys_a_part = _KEYS_A_PART
        grids = {name.removesuffix("_work"): (len(blocks) // 2, heads) for name, blocks in work.items()}
        grids |= {"pad": (len(sizes), 1), "combine": (_ceil(padded[-1] * heads * group, FINISH_THREADS), 1)}
        plan = Plan(kernels, arguments, grids, (tables, space, weight, rows), parts[-1] * heads * group)
        plan.launch("pad")
        return plan

    def launch(self, name: str, early: bool = False) -> None:
        self.kernels[name].launch(self.grids[name], self.arguments, early)

    def measure(self, q: Tensor, k: Tensor, lse: Tensor | None) -> None:
        """Sums of each key's attention, a part of the rows each; arguments as of `measure_prompts`."""
        q, k, a = aligned_rows(q), aligned_rows(k), self.arguments
        a.q, a.k, a.lse = q.data_ptr(), k.data_ptr(), None
        a.q_token, a.q_head, _ = q.stride()
        a.k_token, a.k_head, _ = k.stride()
        if lse is None:
            if a.parts is None:
                space, addresses = _work_space({"parts": self.parts}, q.device)
                a.parts, self.kept = addresses["parts"], (*self.kept, space)
            self.launch("exponents")
        else:
            lse = lse if lse.stride(1) == 1 else lse.contiguous()
            a.lse, a.lse_head = lse.data_ptr(), lse.stride(0)
        self.launch("combine")
        self.launch("attention", early=True)


def _record(s: _Sizes, batch: PromptBatch, b: int, padded: int, parts: int, sums: int) -> tuple[int, ...]:
    """`Prompt` of `src/importance.cuh`, field by field up to its lag."""
    rows = batch.row_starts[b], s.count, padded, s.padded, s.rows_a_part, s.row_parts
    return (batch.starts[b], s.length, *rows, parts, sums, s.key_tiles, s.pair_tiles)


def _work_space(sizes: dict[str, int], device: torch.device) -> tuple[Tensor, dict[str, int]]:
    """One tensor of 4-byte elements and the address of each part, a multiple of 128 bytes."""
    ends = (0, *accumulate(_round_up(size, 32) for size in sizes.values()))
    space = torch.empty(ends[-1], dtype=torch.float32, device=device)
    return space, {name: space.data_ptr() + 4 * at for name, at in zip(sizes, ends, strict=False)}


def source(dtype: torch.dtype, dim: int, group: int, power: int = 1) -> str:
    """The whole source, its constants first. power: of the probabilities that are summed."""
    scale = math.log2(math.e) / math.sqrt(dim)
    constants = [
        f"#define MODEL_BF16 {int(dtype == torch.bfloat16)}",
        f"constexpr int HEAD_DIM = {dim}, GROUP = {group}, POWER = {power};",
        f"constexpr float LOGIT_SCALE = {scale!r}f;",
    ]
    return "\n".join([*constants, read_sources(_SOURCES)])


def compiled(text: str, threads: Mapping[str, int], device: torch.device) -> dict[str, Kernel]:
    """The kernels of a source, by name, each with so many threads a block."""
    module = Module(compile_cubin(text, architecture(device)))
    return {name: module.kernel(name, count) for name, count in threads.items()}


@lru_cache(maxsize=16)
def _kernels(dtype: torch.dtype, dim: int, group: int, device: torch.device) -> dict[str, Kernel]:
    return compiled(source(dtype, dim, group), THREADS, device)


def measure_prompts(batch: PromptBatch, q: Tensor, k: Tensor, lse: Tensor | None = None) -> Tensor:
    """`prompt_importance` of every prompt of a batch, to the bit what each gets alone: q `[T, Hq, D]` and k `[T, H, D]`
    bf16 or fp16 after RoPE, prompts end to end. Returns fp32 `[H, T]`, zeros for prompts without measured rows.

    lse: fp32 `[Hq, T]`, the natural logarithm of each row's sum of exponentials, where prompt attention has left it:
        saves the first of two passes over the keys. The matrix of attention is never held. Work space is kept with the
    batch, so calls on one batch belong on one stream. Raises FormatError for another type or a head_dim that is above
    256 or no multiple of 8.
    """
    tokens, heads, dim = k.shape
    check_measured(q, k)
    if not batch.row_starts[-1] or not tokens:
        return torch.zeros(heads, tokens, dtype=torch.float32, device=k.device)
    plan = _plan(batch, heads, q.shape[1] // heads, dim, k.dtype)
    out = torch.empty(heads, tokens, dtype=torch.float32, device=k.device)
    plan.arguments.out = out.data_ptr()
    plan.measure(q, k, lse)
    plan.launch("finish", early=True)
    return out


def check_measured(q: Tensor, k: Tensor) -> None:
    """Raise FormatError unless the kernels measure attention of queries and keys `[..., D]`."""
    dim = k.shape[-1]
    if q.dtype != k.dtype or k.dtype not in (torch.bfloat16, torch.float16) or dim > 256 or dim % 8:
        raise FormatError(f"the GPU kernels measure bf16 or fp16 keys of head_dim up to 256, not {k.dtype} and {dim}")


def _plan(batch: PromptBatch, heads: int, group: int, dim: int, dtype: torch.dtype) -> Plan:
    key = ("importance", heads, group, dim, dtype)
    plan: Plan | None = batch.scratch.get(key)
    if plan is None:
        kernels = _kernels(dtype, dim, group, batch.table.device)
        plan = batch.scratch[key] = Plan.of(batch, heads, group, dim, kernels)
    return plan


def prompt_importance(q: Tensor, k: Tensor, rows: Tensor, weight: Tensor, lse: Tensor | None = None) -> Tensor:
    """Weighted mean attention that each token got from later query rows, maximum over the GQA group, as
    `siftkv.kernels.reference.prompt_importance` says: q `[N, Hq, D]`, k `[N, H, D]`, rows int64 `[M]` ascending, weight
    fp32 `[M]`, lse fp32 `[Hq, N]`. Returns fp32 `[H, N]`. See `measure_prompts`.
    """
    batch = PromptBatch.of([0], [len(k)], [(0, 0)], [(rows, weight)], k.device)
    return measure_prompts(batch, q, k, lse)


def _ceil(x: int, by: int) -> int:
    return -(-x // by)


def _round_up(x: int, to: int) -> int:
    return _ceil(x, to) * to
