"""One decoder for all supported families, over a flat ragged batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.kernels.fused import add_rms_norm, enter, linear, rms_norm
from siftkv.models.config import ModelConfig
from siftkv.models.layer import DecoderLayer, empty_weight
from siftkv.models.rope import RotaryTable

if TYPE_CHECKING:
    from siftkv.models.statistics import KeyStatistics

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q[T, Hq, D], k[T, H, D], v[T, H, D]) -> [T, Hq, D]` stores the new keys and values, and attends.

Called once a layer, in order, with q and k after norm and rotation. The inputs are views whose last dimension is
contiguous; they are the callee's to keep or overwrite. The softmax scale D^-0.5 is the callee's.
"""


class Decoder(torch.nn.Module):
    """Token ids in, logits out, with the attention left to the caller.

    T tokens of any number of requests lie one after another in one flat batch, without padding: only `attend` knows
    where one request ends. Weights are uninitialised until a loader or `random_model` fills them. Inference only: no
    weight has a gradient.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        self.rotary = RotaryTable(config, config.context_limit, device)
        self.layers = [DecoderLayer(config, dtype, device) for _ in range(config.num_layers)]
        self.embedding = empty_weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.final_norm = empty_weight(config.hidden_size, dtype=dtype, device=device)
        self.head = self.embedding
        self.values_conditioned = False
        """Whether `siftkv.models.values.condition_values` has been folded into the weights."""
        self.key_statistics: KeyStatistics | None = None
        """What keys look like since `siftkv.models.keys.condition_keys` was folded into the weights."""
        self.layer_costs: tuple[float, ...] | None = None
        """What `siftkv.engine.layer_costs` has measured."""
        if not config.tie_embeddings:
            self.head = empty_weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.parameters().items():
                self.register_parameter(f"layer{index}_{name}", parameter)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, lengths: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, [T, hidden_size], in the model's dtype.

        token_ids, positions: [T] int64 on the model's device; a position is a token's place in its own request.
        lengths: [T] integers, read by models with dynamic NTK only: see `RotaryTable.gather`.
        """
        x, normed, cos, sin = self._enter(token_ids, positions, lengths)
        eps, next_norms = self.config.rms_norm_eps, [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            q, k, v = layer.project(normed, cos, sin)
            del normed  # as large as the queries
            attended = attend(index, q, k, v)
            del q, k, v  # before the next layer's exist
            x, normed = add_rms_norm(x, layer.output(attended), layer.mlp_norm, eps)
            del attended
            x, normed = add_rms_norm(x, layer.mlp(normed), next_norm, eps)
        return normed

    def _enter(
        self, token_ids: Tensor, positions: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Embeddings [T, E], the first layer's input [T, E], and rotary factors [T, 1, D] each."""
        rotary, norm, eps = self.rotary, self.layers[0].input_norm, self.config.rms_norm_eps
        if rotary.serves(lengths):
            return enter(token_ids, positions, self.embedding, norm, eps, rotary.cos, rotary.sin)
        x = F.embedding(token_ids, self.embedding)
        return x, rms_norm(x, norm, eps), *rotary.gather(positions, lengths)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[M, hidden_size] of `forward` -> [M, vocab_size] float32."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """`logits` in the model's dtype, in which they are computed."""
        return linear(hidden, self.head, None)

    def key_bias(self, layer: int) -> Tensor | None:
        """[H, D] float32: the bias in every key before rotation, or None where there is none or a norm follows it."""
        bias = self.layers[layer].qkv_bias
        if bias is None or self.config.qk_norm:
            return None
        return self._key_rows(bias).float()

    def key_spread(self, layer: int) -> Tensor:
        """[H, D] float32: the standard deviation of each key channel before rotation, estimated from the weights alone.

        The input of the projection is RMS-normalised, so its channels have unit mean square on average; taken as
        uncorrelated with mean zero, channel c of the key has variance sum_i (W_k[c, i] * norm[i])^2. Where a norm over
        head_dim follows the projection (Qwen3), the result is that deviation after the norm.
        """
        weights = self.layers[layer]
        scaled = self._key_rows(weights.qkv).float() * weights.input_norm.float()  # [H, D, E]
        spread = scaled.square().sum(-1).sqrt_()
        if weights.qk_norm is None:
            return spread
        root_mean_square = spread.square().mean(-1, keepdim=True).sqrt_()
        return spread / root_mean_square * weights.qk_norm[self.config.num_heads :].float()

    def _key_rows(self, fused: Tensor) -> Tensor:
        start = self.config.num_heads * self.config.head_dim
        size = self.config.num_kv_heads * self.config.head_dim
        return fused[start : start + size].view(self.config.num_kv_heads, self.config.head_dim, *fused.shape[1:])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves (`.to`, `.cuda`) take the rotary tables along; they change device but never dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.rotary.to(self.embedding.device)
        return self
