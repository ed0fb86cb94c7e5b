"""The arithmetic of one decoder layer around its attention.

Plain tensors and few operations: at one token a step, overhead is time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from siftkv.kernels.fused import linear, merges_rotation, rotate, rotated_linear, swiglu_linear
from siftkv.models.config import ModelConfig

_CPU_ROWS, _GPU_ROWS = 1024, 8192
"""Rows of a prompt that pass through the MLP at a time, since its inner activations are the largest of all: on a CPU
they shall neither leave the caches nor come from fresh pages. A GPU's products gain nothing from more rows, and those
of 131,072 tokens of an 8B shape would take 11 GB.
"""


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

    def linears(self) -> tuple[tuple[Parameter, Parameter | None], ...]:
        """Weights and biases of the layer's products, in the order in which they run."""
        return (
            (self.qkv, self.qkv_bias),
            (self.o, self.o_bias),
            (self.gate_up, self.gate_up_bias),
            (self.down, self.down_bias),
        )

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x[T, E], normed by `input_norm` -> q[T, Hq, D], k[T, H, D], v[T, H, D].

        q and k are normed over D where the model does so, then turned by cos and sin [T, 1, D].
        """
        if self.qk_norm is None and merges_rotation(x, self.qkv):
            qkv = rotated_linear(x, self.qkv, self.qkv_bias, cos, sin, self.num_qk_heads)
            return qkv[:, : self.num_heads], qkv[:, self.num_heads : self.num_qk_heads], qkv[:, self.num_qk_heads :]
        qkv = linear(x, self.qkv, self.qkv_bias).view(x.shape[0], self.num_qkv_heads, self.head_dim)
        qk = qkv[:, : self.num_qk_heads]
        if self.qk_norm is not None:
            qk = torch.rms_norm(qk, (self.head_dim,), None, self.eps) * self.qk_norm
        qk = rotate(qk, cos, sin)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, self.num_qk_heads :]

    def output(self, attended: Tensor) -> Tensor:
        """attended[T, Hq, D] -> [T, E]."""
        return linear(attended.flatten(1), self.o, self.o_bias)

    def mlp(self, x: Tensor) -> Tensor:
        """SwiGLU: x[T, E], normed by `mlp_norm` -> [T, E]."""
        cpu, tokens = x.device.type == "cpu", x.shape[0]
        most = _CPU_ROWS if cpu else _GPU_ROWS
        if tokens <= most:
            return self._mlp(x)
        rows = most if cpu else -(-tokens // -(-tokens // most))  # products of few rows are another library's kernels
        out = torch.empty_like(x)
        for part, place in zip(x.split(rows), out.split(rows), strict=True):
            place.copy_(self._mlp(part))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        return linear(swiglu_linear(x, self.gate_up, self.gate_up_bias), self.down, self.down_bias)


def empty_weight(*shape: int, dtype: torch.dtype, device: str | torch.device) -> Parameter:
    """An uninitialised weight without gradient."""
    return Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
