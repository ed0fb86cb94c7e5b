"""How linear layers of 3 to 16 rows are laid out on GPUs whose blocks form clusters (compute capability 9.0 and later):
see `src/linear_mma.cu`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from siftkv.kernels.cuda.compile import architecture, compile_cubin
from siftkv.kernels.cuda.device import GPU, gpu_of
from siftkv.kernels.cuda.driver import Kernel, Module
from siftkv.kernels.cuda.pages import read_sources

KINDS = ("plain", "swiglu", "rotary")
_SOURCES = ("ptx.cuh", "values.cuh", "cluster.cuh", "linear.cuh", "linear_mma.cu")
_BLOCK = 32
"""Channels of which a lane takes 16 bytes of each row: two products deep."""
_LAYOUTS = {8: ((16, 1, 4), (8, 2, 7), (8, 4, 7)), 16: ((16, 1, 4), (8, 1, 4), (8, 4, 7))}
"""By rows of x: warps of a block, blocks of a cluster and blocks of channels that a stage holds at most, the fastest
first. The first is taken whose registers hold x.
"""
_X_REGISTERS = {8: 128, 16: 64}
"""Of a thread for its part of x, by warps of a block."""
_LEAST_STAGES, _MOST_STAGES = 2, 8
"""Of a warp's ring."""


@dataclass(frozen=True)
class LinearPlan:
    """One kernel's sizes.

    columns: rows of x at most, 8 or 16. inputs: channels, a multiple of 32. warps: of a block. cluster: blocks that
        share the channels. part: blocks of 32 channels that a stage of a warp's ring holds.
    """

    columns: int
    inputs: int
    warps: int
    cluster: int
    part: int

    @classmethod
    def of(cls, rows: int, inputs: int, gpu: GPU) -> LinearPlan | None:
        """The layout for so many rows of x. None where the library is as good or the GPU has too little."""
        columns, blocks = 8 if rows <= 8 else 16, inputs // _BLOCK
        if not gpu.starts_early or inputs % _BLOCK:
            return None
        for warps, cluster, most in _LAYOUTS[columns]:
            share = -(-blocks // (warps * cluster))
            parts = -(-share // most)
            plan = cls(columns, inputs, warps, cluster, -(-share // parts))
            if parts * plan.part * columns // 2 <= _X_REGISTERS[warps] and plan.stages(gpu) >= _LEAST_STAGES:
                return plan
        return None

    @property
    def _stage_bytes(self) -> int:
        return self.warps * (16 * 64 * self.part + 128)

    @property
    def _result_bytes(self) -> int:
        return max(2, self.cluster) * self.warps * 64 * self.columns

    def stages(self, gpu: GPU) -> int:
        """Of each warp's ring."""
        return min(_MOST_STAGES, (gpu.dynamic_shared_bytes - self._result_bytes) // self._stage_bytes)

    def shared_bytes(self, gpu: GPU) -> int:
        """Of a block."""
        return self.stages(gpu) * self._stage_bytes + self._result_bytes

    def source(self, dtype: torch.dtype, gpu: GPU) -> str:
        """CUDA source for one 16-bit type."""
        values = {
            "COLUMNS": self.columns,
            "INPUTS": self.inputs,
            "MMA_WARPS": self.warps,
            "CLUSTER": self.cluster,
            "STAGE_BLOCKS": self.part,
            "RING": self.stages(gpu),
        }
        constants = "".join(f"constexpr int {name} = {value};\n" for name, value in values.items())
        dims = f"__cluster_dims__({self.cluster}, 1, 1)" if self.cluster > 1 else ""
        defines = f"#define MODEL_BF16 {int(dtype == torch.bfloat16)}\n#define CLUSTER_DIMS {dims}\n"
        return f"{defines}{constants}{read_sources(_SOURCES)}"

    def grid(self, pairs: int, most: int) -> int:
        """Blocks for so many pairs of rows of the weight: as many clusters as have equal work. most: clusters that run
        at once.
        """
        groups = -(-pairs // 8)
        return self.cluster * -(-groups // -(-groups // most))


@dataclass(frozen=True)
class Compiled:
    """A plan's kernels by kind, and how many of its clusters run at once."""

    plan: LinearPlan
    kernels: dict[str, Kernel]
    clusters: int

    def launch(self, kind: str, pairs: int, arguments: ctypes.Structure) -> None:
        """Launch the kernel of a kind, early, for so many pairs of rows of the weight."""
        self.kernels[kind].launch((self.plan.grid(pairs, self.clusters), 1), arguments, early=True)


@cache
def compiled(plan: LinearPlan, dtype: torch.dtype, device: torch.device) -> Compiled:
    """The kernels of a plan on a device."""
    gpu = gpu_of(device)
    module = Module(compile_cubin(plan.source(dtype, gpu), architecture(device)))
    threads, shared = 32 * plan.warps, plan.shared_bytes(gpu)
    kernels = {kind: module.kernel(kind, threads, shared) for kind in KINDS}
    most = torch.cuda.get_device_properties(device).multi_processor_count
    return Compiled(plan, kernels, most if plan.cluster == 1 else kernels[KINDS[0]].clusters(plan.cluster))
