"""The arithmetic of one decoder layer around its attention.

Plain tensors and few operations: at one token a step, overhead is time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from siftkv.models.config import ModelConfig
from siftkv.models.rope import apply_rotary


class DecoderLayer:
    """Weights of one layer, the projections that read the same input fused into one matrix.

    Shapes: E hidden_size, I intermediate_size, Hq query heads, H kv heads, D head_dim.
    """

    __slots__ = (
        "down",
        "down_bias",
        "eps",
        "gate_up",
        "gate_up_bias",
        "head_dim",
        "input_norm",
        "intermediate_size",
        "mlp_norm",
        "num_heads",
        "num_qk_heads",
        "num_qkv_heads",
        "o",
        "o_bias",
        "qk_norm",
        "qkv",
        "qkv_bias",
    )

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device) -> None:
        def optional(present: bool, *shape: int) -> Parameter | None:
            return empty_weight(*shape, dtype=dtype, device=device) if present else None

        def weight(*shape: int) -> Parameter:
            return empty_weight(*shape, dtype=dtype, device=device)

        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.num_heads = config.num_heads
        self.num_qk_heads = config.num_heads + config.num_kv_heads
        self.head_dim = dim
        self.intermediate_size = inner
        self.eps = config.rms_norm_eps
        self.num_qkv_heads = self.num_qk_heads + config.num_kv_heads
        rows = self.num_qkv_heads * dim
        self.input_norm = weight(hidden)
        self.mlp_norm = weight(hidden)
        self.qkv = weight(rows, hidden)  # rows: Hq*D of q, H*D of k, H*D of v
        self.qkv_bias = optional(config.qkv_bias, rows)
        self.qk_norm = optional(config.qk_norm, self.num_qk_heads, dim)  # rows: Hq times q's norm, H times k's
        self.o = weight(hidden, config.num_heads * dim)
        self.o_bias = optional(config.o_bias, hidden)
        self.gate_up = weight(2 * inner, hidden)  # rows: I of gate, I of up
        self.gate_up_bias = optional(config.mlp_bias, 2 * inner)
        self.down = weight(hidden, inner)
        self.down_bias = optional(config.mlp_bias, hidden)

    def parameters(self) -> dict[str, Parameter]:
        """Every weight that this layer has, by name."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in values.items() if isinstance(value, Parameter)}

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x[T, E] -> q[T, Hq, D], k[T, H, D], v[T, H, D].

        q and k are normed over D where the model does so, then turned by cos and sin [T, 1, D].
        """
        qkv = F.linear(rms_norm(x, self.input_norm, self.eps), self.qkv, self.qkv_bias)
        qkv = qkv.view(x.shape[0], self.num_qkv_heads, self.head_dim)
        qk = qkv[:, : self.num_qk_heads]
        if self.qk_norm is not None:
            qk = torch.rms_norm(qk, (self.head_dim,), None, self.eps) * self.qk_norm
        qk = apply_rotary(qk, cos, sin)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, self.num_qk_heads :]

    def output(self, attended: Tensor) -> Tensor:
        """attended[T, Hq, D] -> [T, E]."""
        return F.linear(attended.flatten(1), self.o, self.o_bias)

    def mlp(self, x: Tensor) -> Tensor:
        """SwiGLU: x[T, E] -> [T, E]."""
        gate_up = F.linear(rms_norm(x, self.mlp_norm, self.eps), self.gate_up, self.gate_up_bias)
        gated = F.silu(gate_up[:, : self.intermediate_size]).mul_(gate_up[:, self.intermediate_size :])
        return F.linear(gated, self.down, self.down_bias)


_FUSED_NORM_ROWS = 64
"""Above this PyTorch's fused norm, which widens all of x, costs a CPU three times what a reduction and two in-place
passes do.
"""


def empty_weight(*shape: int, dtype: torch.dtype, device: str | torch.device) -> Parameter:
    """An uninitialised weight without gradient."""
    return Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype.

    Like `transformers`, the norm is computed in float32 and rounded to x's dtype before the weight is applied.
    """
    if x.dtype is torch.float32:
        return torch.rms_norm(x, weight.shape, weight, eps)
    if x.shape[0] <= _FUSED_NORM_ROWS:
        return torch.rms_norm(x, weight.shape, None, eps) * weight
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, inverse, out=torch.empty_like(x)).mul_(weight)
