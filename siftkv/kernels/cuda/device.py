"""What a GPU offers the kernels: its compute capability and shared memory, which sizes and ways of launching follow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

LOWEST_CAPABILITY = (8, 0)
"""Tensor cores for bf16, asynchronous copies to shared memory, and barriers that wait for them came with Ampere."""

_STATIC_SHARED = 1024
"""Bytes of a block's shared memory that are left to what a kernel declares itself."""


@dataclass(frozen=True)
class GPU:
    """A kind of GPU.

    capability: compute capability. block_shared_bytes: shared memory that one block may ask for, 227 KiB on Hopper, 163
        KiB on A100 (8.0), 99 KiB on 8.6, 8.9 and 12.0.
    """

    capability: tuple[int, int]
    block_shared_bytes: int

    @property
    def dynamic_shared_bytes(self) -> int:
        """Shared memory that a kernel may ask for at its launch."""
        return self.block_shared_bytes - _STATIC_SHARED

    @property
    def starts_early(self) -> bool:
        """Whether a kernel may start before its predecessor has ended (programmatic launches)."""
        return self.capability >= (9, 0)


pretended: GPU | None = None
"""For tests: what every device is taken for. Code for another GPU than the present one is PTX, which its driver
compiles; it must be able to run what the pretended one can.
"""


def gpu_of(device: torch.device) -> GPU:
    """What the kernels may use of a device."""
    return pretended or _gpu_of(device)


@cache
def _gpu_of(device: torch.device) -> GPU:
    capability = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    return GPU(capability, properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
