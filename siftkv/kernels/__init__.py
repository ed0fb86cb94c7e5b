"""Kernels: operations on a `CacheState` with one signature and several bodies.

`reference` is PyTorch and runs anywhere; `numba` is compiled for the CPU at first use. `get_kernels` picks one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from siftkv.errors import SiftKVError
from siftkv.kernels.state import CacheState

BACKENDS = ("reference", "numba")


class Kernels(Protocol):
    """The operations, documented at their reference bodies in `siftkv.kernels.reference`."""

    def decode_attention(
        self, state: CacheState, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor: ...

    def sift_step(self, state: CacheState, slots: Tensor, advance: bool = True) -> Tensor: ...

    def prompt_importance(self, q: Tensor, k: Tensor, rows: Tensor, weight: Tensor) -> Tensor: ...

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


def get_kernels(name: str = "auto", device: torch.device | str = "cpu") -> Kernels:
    """Kernel bodies by name: `auto` takes numba on a CPU and the reference elsewhere."""
    if name == "auto":
        name = "numba" if torch.device(device).type == "cpu" else "reference"
    module: ModuleType
    if name == "reference":
        from siftkv.kernels import reference as module
    elif name == "numba":
        from siftkv.kernels import numba as module
    else:
        raise SiftKVError(f"unknown kernels {name!r}: use auto, {' or '.join(BACKENDS)}")
    return cast(Kernels, module)
