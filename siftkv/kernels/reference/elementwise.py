"""The operations of `siftkv.kernels.fused` in PyTorch: what the fast bodies are tested against, and what decodes few
rows on a CPU, where overhead is time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_FUSED_NORM_ROWS = 64
"""Above this PyTorch's fused norm, which widens all of x, costs a CPU three times what a reduction and two in-place
passes do.
"""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `siftkv.kernels.fused.rms_norm`."""
    if x.dtype is torch.float32:
        return torch.rms_norm(x, weight.shape, weight, eps)
    if x.shape[0] <= _FUSED_NORM_ROWS:
        return torch.rms_norm(x, weight.shape, None, eps) * weight
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, inverse, out=torch.empty_like(x)).mul_(weight)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `siftkv.kernels.fused.add_rms_norm`."""
    x = x + update
    return x, rms_norm(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `siftkv.kernels.fused.rotate`."""
    return (x * cos).addcmul_(torch.roll(x, x.shape[-1] // 2, -1), sin).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """See `siftkv.kernels.fused.swiglu`."""
    inner = gate_up.shape[-1] // 2
    return F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:])
