"""Random models, for tests and for benchmarks that need a shape and not an answer."""

from __future__ import annotations

import torch

from siftkv.models.config import ModelConfig
from siftkv.models.decoder import Decoder


def random_model(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Decoder:
    """A decoder with random weights: matrices keep the variance of their input, norms stay near 1, biases are small.

    The same seed gives the same weights on the same kind of device; drawn in float32 and rounded to `dtype`.
    """
    decoder = Decoder(config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in decoder.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, device=device)
        if name.endswith("norm"):
            weight.copy_(1 + 0.1 * noise)
        elif name.endswith("bias"):
            weight.copy_(0.1 * noise)
        elif name == "embedding":
            weight.copy_(noise)
        else:
            weight.copy_(noise * weight.shape[-1] ** -0.5)
    return decoder
