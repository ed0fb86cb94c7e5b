"""What kernels that take a whole batch of prompts are told: records and lists of work, on the device in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def blocks_of(counts: Iterable[int]) -> list[int]:
    """`(prompt, index)` of every block of a launch, pair after pair, where prompt `b` takes `counts[b]` blocks."""
    return [x for prompt, count in enumerate(counts) for index in range(count) for x in (prompt, index)]


def on_device(tables: Mapping[str, list[int]], device: torch.device) -> tuple[Tensor, dict[str, int]]:
    """Tables of int32 in one copy that the host does not wait for, and the address of each, a multiple of 16 bytes."""
    flat: list[int] = []
    offsets = {}
    for name, values in tables.items():
        offsets[name] = 4 * len(flat)
        flat += values + [0] * (-len(values) % 4)
    packed = torch.tensor(flat, dtype=torch.int32).pin_memory().to(device, non_blocking=True)
    return packed, {name: packed.data_ptr() + offset for name, offset in offsets.items()}


def aligned_rows(x: Tensor) -> Tensor:
    """Rows of 16-byte pieces; a view of a fused projection stays a view."""
    token, head, inner = x.stride()
    return x if inner == 1 and not (token | head) % 8 and x.data_ptr() % 16 == 0 else x.contiguous()
