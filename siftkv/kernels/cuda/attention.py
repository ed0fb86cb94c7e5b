"""`decode_attention` on a GPU: three launches a layer, no number read by the host, so a CUDA graph can hold a step.

`prepare` appends to the window, brings queries into the order of the tensor cores and lays all segments of all heads on
a line of cost; `attend` gives each team of warps an equal share of that line; `merge` combines partial results and,
where a refresh is due, moves the stored scores.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.errors import SiftKVError
from siftkv.kernels.cuda.bias import bias_tables
from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.driver import Module
from siftkv.kernels.cuda.plan import Plan
from siftkv.kernels.state import CacheState, Conditioning

_PREPARE_THREADS = 256
_MERGE_THREADS = 256
_REFRESH_LAYERS = 4
"""The logits buffer has room for this many times a layer's mean share of the pool; heads beyond skip that refresh."""

_POINTERS = (
    *("slots", "q", "k", "v", "out", "pages", "table", "lengths", "window_k", "window_v", "window_score"),
    *("seen", "window_start", "sinks", "refresh", "horizon", "signs", "bias", "pairs", "rank"),
    *("trig", "near", "runs", "turns"),
    *("query", "bias_query", "query_sum", "segments", "line", "partial_max", "partial_sum", "partial_out", "logits"),
    *("queries", "page_skip"),
)


class _Arguments(ctypes.Structure):
    """`Arguments` of `src/state.cuh`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("q_row", "k_row", "v_row")),
        *((name, ctypes.c_int) for name in ("layer", "batch", "teams", "logits_room")),
    )


def hadamard_signs(c: Conditioning) -> Tensor:
    """Signs of the rotation times its scale, fp32 `[D]`. Raises SiftKVError unless that is signed block Hadamard."""
    dim = c.rotation.shape[0]
    block = dim & -dim
    rows = torch.arange(dim, device=c.rotation.device)
    signs = c.rotation[rows, rows // block * block]
    index = rows % block
    bits = index[:, None] & index
    parity = sum((bits >> i) & 1 for i in range(block.bit_length())) % 2
    expected = (1.0 - 2.0 * parity) * (rows[:, None] // block == rows // block) * signs[:, None]
    if not torch.allclose(expected, c.rotation, atol=1e-5):
        raise SiftKVError(
            "the GPU kernels turn queries by a signed block Hadamard transform, and this cache's rotation is another"
        )
    return signs.contiguous()


@dataclass
class _Workspace:
    """What the launches of one batch size hand to each other."""

    tensors: dict[str, Tensor]
    logits_room: int


class CudaAttention:
    """Compiled kernels of one cache at one GQA group, and their work space."""

    def __init__(self, state: CacheState, plan: Plan) -> None:
        device = state.pages.device
        self.plan = plan
        module = Module(compile_cubin(plan.source(), architecture(device)))
        self._prepare = module.kernel("prepare", _PREPARE_THREADS)
        self._attend = module.kernel("attend", 32 * plan.grid_warps, plan.shared_bytes)
        self._merge = module.kernel("merge", _MERGE_THREADS)
        self._module = module
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspaces: dict[int, _Workspace] = {}
        self._constants = self._constant_tensors(state)

    def _constant_tensors(self, state: CacheState) -> dict[str, Tensor]:
        c = state.conditioning
        constants = {"bias": c.bias, "pairs": c.pairs, "rank": c.rank}
        if c.rotates:
            constants["signs"] = hadamard_signs(c)
        constants |= bias_tables(c, self.plan.run_rows) if c.has_bias else {}
        names = ["pages", "lengths", "window_k", "window_v", "window_score", "seen", "window_start", "sinks", "refresh"]
        names += ["horizon", "queries", "page_skip"]
        return constants | {name: getattr(state, name) for name in names} | {"table": state.page_table}

    @property
    def _teams(self) -> int:
        return self._processors * self.plan.teams

    def _logits_room(self, state: CacheState) -> int:
        """Tokens: windows of all slots, and tiers up to `_REFRESH_LAYERS` times a layer's mean share of the pool."""
        slots, layers, heads, _ = state.lengths.shape
        tokens = state.num_pages * max(layout.tokens for layout in state.layouts)
        share = -(-tokens * _REFRESH_LAYERS // layers)
        return int(min(tokens, share) + slots * heads * (state.sink_rows + state.ring_rows))

    def _workspace(self, state: CacheState, batch: int) -> _Workspace:
        if batch not in self._workspaces:
            self._workspaces[batch] = self._allocate(state, batch)
        return self._workspaces[batch]

    def _allocate(self, state: CacheState, batch: int) -> _Workspace:
        plan, device = self.plan, state.pages.device
        pairs, kinds = batch * state.lengths.shape[2], len(state.layouts) + 1
        parts, columns = (pairs + self._teams) * plan.team_warps, 8 * plan.columns
        room = self._logits_room(state)
        others = [w for w in self._workspaces.values() if w.logits_room == room]

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        tensors = {
            "query": empty(pairs, kinds, plan.query_words, 32, dtype=torch.int32),
            "bias_query": empty(pairs, max(1, plan.bias_blocks), plan.columns, 32, 4),
            "query_sum": empty(pairs, kinds, columns, plan.most_key_groups),
            "segments": empty(pairs * kinds + 1, 4, dtype=torch.int32),
            "line": empty(2, dtype=torch.int32),
            "partial_max": empty(parts, columns),
            "partial_sum": empty(parts, columns),
            "partial_out": empty(parts, plan.group, plan.dim),
            "logits": others[0].tensors["logits"] if others else empty(room, plan.logit_row),
        }
        return _Workspace(tensors, room)

    def __call__(self, state: CacheState, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads = k.shape[:2]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not batch:
            return out
        q, k, v, slots = _rows(q), _rows(k), _rows(v), slots.contiguous()
        space = self._workspace(state, batch)
        arguments = _Arguments()
        given = {"slots": slots, "q": q, "k": k, "v": v, "out": out}
        for name, tensor in (self._constants | space.tensors | given).items():
            setattr(arguments, name, tensor.data_ptr())
        arguments.q_row, arguments.k_row, arguments.v_row = q.stride(0), k.stride(0), v.stride(0)
        arguments.layer, arguments.batch = layer, batch
        arguments.teams, arguments.logits_room = self._teams, space.logits_room
        pairs = batch * heads
        self._prepare.launch((pairs + 1, 1), arguments)
        self._attend.launch((self._processors, 1), arguments, early=True)
        self._merge.launch((pairs, min(32, -(-4 * self._processors // pairs))), arguments, early=True)
        return out


def _rows(x: Tensor) -> Tensor:
    """`[B, n, D]` whose requests are contiguous; a view of a fused projection stays a view."""
    return x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def decode_attention(state: CacheState, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one new token a request over all that its heads keep, as the reference's `decode_attention`.

    slots: `[B]` int64 on the device, distinct. q: `[B, Hq, D]`, k and v: `[B, H, D]`, in the cache's dtype, after RoPE.
    Returns `[B, Hq, D]`. The first call of a cache compiles (seconds, once a machine) and the first of a batch size
    allocates; call it once before capturing it in a CUDA graph. Raises FormatError for a format or shape that the
    kernels do not read, SiftKVError where the GPU or its compiler is missing or `q` has another dtype.
    """
    if q.dtype != state.window_k.dtype or k.dtype != q.dtype or v.dtype != q.dtype:
        raise SiftKVError(
            f"queries, keys and values must be {state.window_k.dtype}, the cache's dtype, "
            f"not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    group = q.shape[1] // k.shape[1]
    bodies: dict[int, CudaAttention] = state.scratch.setdefault("cuda_attention", {})
    if group not in bodies:
        bodies[group] = CudaAttention(state, Plan(state, group))
    return bodies[group](state, layer, slots, q, k, v)
