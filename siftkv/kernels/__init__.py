"""Kernels: operations on a `CacheState` with one signature and several bodies.

`reference` is PyTorch and runs anywhere; `numba` is compiled for the CPU and `cuda` for the GPU at first use.
`get_kernels` picks one.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from siftkv.errors import FormatError, SiftKVError
from siftkv.formats import Tier
from siftkv.kernels.prompts import PromptBatch
from siftkv.kernels.state import CacheState

BACKENDS = ("reference", "numba", "cuda")


class Kernels(Protocol):
    """The operations, documented at their reference bodies in `siftkv.kernels.reference`.

    DEFERS_FAULTS: `append_tokens` needs no check of free pages beforehand. When they are short it keeps nothing and
    counts the refusal on the device, where `refused_layers` finds it.
    """

    DEFERS_FAULTS: bool

    def decode_attention(
        self, state: CacheState, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor: ...

    def sift_step(self, state: CacheState, slots: Tensor, examine: bool = True) -> Tensor: ...

    def prompt_importance(
        self, q: Tensor, k: Tensor, rows: Tensor, weight: Tensor, lse: Tensor | None = None
    ) -> Tensor: ...

    def measure_prompts(self, batch: PromptBatch, q: Tensor, k: Tensor, lse: Tensor | None = None) -> Tensor: ...

    def store_prompts(
        self, state: CacheState, layer: int, batch: PromptBatch, k: Tensor, v: Tensor, score: Tensor, tier: Tensor
    ) -> None: ...

    def append_tokens(
        self,
        state: CacheState,
        layer: int,
        slot: int,
        k: Tensor,
        v: Tensor,
        score: Tensor,
        position: Tensor,
        tier: Tensor,
    ) -> None: ...

    def write_window(
        self, state: CacheState, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor
    ) -> None: ...

    def release(self, state: CacheState, slots: Tensor) -> None: ...

    def refused_layers(self, state: CacheState) -> Tensor: ...


def get_kernels(
    name: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tiers: Iterable[Tier] = (),
) -> Kernels:
    """Kernel bodies by name for a device, a model's dtype and a pool's tiers.

    `auto` takes numba on a CPU, cuda for 16-bit models on GPUs that these kernels serve, else the reference; and the
    reference for a pool with `fp8` or another baseline that only it knows. Raises FormatError where other bodies are
    asked for.
    """
    alone = [tier.name for tier in tiers if tier.format.reference_only]
    if name == "auto":
        name = "reference" if alone else _best(torch.device(device), dtype)
    elif alone and name in BACKENDS[1:]:
        raise FormatError(f"kernels {name!r} do not serve {alone[0]}: use kernels='auto' or 'reference'")
    module: ModuleType
    if name == "reference":
        from siftkv.kernels import reference as module
    elif name == "numba":
        from siftkv.kernels import numba as module
    elif name == "cuda":
        from siftkv.kernels import cuda as module
    else:
        raise SiftKVError(f"unknown kernels {name!r}: use auto, {', '.join(BACKENDS)}")
    return cast(Kernels, module)


def _best(device: torch.device, dtype: torch.dtype) -> str:
    if device.type == "cpu":
        return "numba"
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "reference"
    from siftkv.kernels.cuda.compile import serves

    return "cuda" if serves(device) else "reference"
