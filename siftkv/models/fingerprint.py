"""What tells one model from another: its shape, and a sample of the weights that the engine leaves as they are."""

from __future__ import annotations

import hashlib

import torch

from siftkv.models.decoder import Decoder

_SAMPLES = 64
"""Elements of each weight that go into a fingerprint."""

_SMALLEST = 2.0**-13
"""Smaller weights count as zero: 16-bit types round them differently."""


def model_fingerprint(decoder: Decoder) -> str:
    """16 hex digits that are the same for one model in any dtype, on any device, before and after conditioning.

    Queries, keys, values and output projections are left out: the engine scales and rotates them.
    """
    c = decoder.config
    shape = c.architecture, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.hidden_size, c.vocab_size
    digest = hashlib.sha256(repr(shape).encode())
    weights = [decoder.embedding, decoder.final_norm, decoder.head]
    for layer in decoder.layers:
        weights += [layer.input_norm, layer.mlp_norm, layer.gate_up, layer.down]
    for weight in weights:
        flat = weight.detach().flatten()
        at = torch.linspace(0, len(flat) - 1, _SAMPLES, dtype=torch.float64).long().to(flat.device)
        rounded = flat[at].bfloat16().float().cpu()
        digest.update(torch.where(rounded.abs() < _SMALLEST, 0.0, rounded).numpy().tobytes())
    return digest.hexdigest()[:16]
