"""Rotary position embedding (Su et al., arXiv 2104.09864), half-split (NeoX): channel i turns with channel i + D/2.

Shapes: T tokens, D head_dim, P rows of the table.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from siftkv.kernels.fused import rotary_factors, rotate
from siftkv.models.config import ModelConfig
from siftkv.models.rope_config import RopeConfig


class RotaryTable:
    """Angles of every position of a model, computed once.

    `cos`, `sin`: [P, D/2] float32, multiplied by the attention factor of YaRN (1 elsewhere). Row p belongs to position
    p; only positions below P = `max_len` may be looked up (an `IndexError` on a CPU, a device assert on a GPU).

    Dynamic NTK is the one type whose frequencies depend on the request: on its length in tokens, where that exceeds the
    length of the pretraining (`transformers` takes the length at the forward pass that computes the key). Row p then
    holds the angles of a token that arrives last in a request of p + 1 tokens, as in decoding; for prompt tokens pass
    `lengths`.
    """

    def __init__(self, config: ModelConfig, max_len: int, device: str | torch.device = "cpu") -> None:
        self._rope = config.rope
        self._head_dim = config.head_dim
        self.max_len = max_len
        inv_freq, self._attention_factor = _inverse_frequencies(config)
        self._inv_freq = inv_freq.to(device)  # [D/2]
        positions = torch.arange(max_len, device=device)
        self.cos, self.sin = self._cos_sin(positions, positions + 1)

    def to(self, device: str | torch.device) -> None:
        """Move the tables. They stay float32 whatever the model's dtype."""
        self._inv_freq, self.cos, self.sin = (t.to(device) for t in (self._inv_freq, self.cos, self.sin))

    def gather(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Factors for `siftkv.kernels.fused.rotate` at positions[T] (int64): cos and signed sin, both [T, 1, D] fp32.

        `lengths` [T]: the length of each token's request, read by dynamic NTK only; the prompt's length for a token of
        the prompt, position + 1 (the default) for a generated one.
        """
        if lengths is None or self.serves(lengths):
            return rotary_factors(self.cos.index_select(0, positions), self.sin.index_select(0, positions))
        return rotary_factors(*self._cos_sin(positions, lengths))

    def serves(self, lengths: Tensor | None) -> bool:
        """Whether the tables hold what `gather` gives for tokens of requests of these lengths."""
        return lengths is None or self._rope.type != "dynamic"

    def rotate(self, x: Tensor, positions: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Turn x[T, heads, D] to positions[T]; computed in float32, returned in x's dtype. `lengths` as in `gather`.

        `transformers` rounds cos and sin to the model's dtype first, which in 16 bits puts keys up to 0.4 % off their
        true phase.
        """
        cos, sin = self.gather(positions, lengths)
        return rotate(x, cos, sin)

    def _cos_sin(self, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self._dynamic_frequencies(lengths) if self._rope.type == "dynamic" else self._inv_freq
        angles = positions.float().unsqueeze(-1) * inv_freq  # [T, D/2]
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor

    def _dynamic_frequencies(self, lengths: Tensor) -> Tensor:
        """[T, D/2]: each token's frequencies at its request's length, free of branches as CUDA graphs need it."""
        original, factor, dim = self._rope.original_max_position, self._rope.factor, self._head_dim
        assert original is not None
        stretch = factor * lengths.clamp(min=original) / original - (factor - 1)
        base = self._rope.theta * stretch ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, device=lengths.device).float() / dim
        return 1.0 / base.unsqueeze(-1) ** exponents


def _inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    if config.rope.type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / config.rope.theta**exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # slow to import, and most models need none of it

    original = config.rope.original_max_position
    assert original is not None
    source = SimpleNamespace(
        rope_parameters=config.rope.parameters(),
        standardize_rope_params=lambda: None,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        max_position_embeddings=original if config.rope.type == "dynamic" else config.max_position,
    )
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[config.rope.type](source, torch.device("cpu"))
    return inv_freq.float(), float(attention_factor)


def llama3_factors(config: ModelConfig) -> Tensor:
    """[D/2] float32: what RoPE type llama3 divides each frequency by, called `rope_freqs.weight` in GGUF files."""
    plain, _ = _inverse_frequencies(replace(config, rope=RopeConfig(theta=config.rope.theta)))
    scaled, _ = _inverse_frequencies(config)
    return plain / scaled
