"""What a model's keys and queries look like before rotation, measured on a short text that comes with the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.data import TEXTS, read_text
from siftkv.kernels.fused import rotate
from siftkv.models.decoder import Decoder

MEASURED_TOKENS = 512
_FIRST = 8
"""First tokens that are left out: an attention sink's key is like no other."""


@dataclass(frozen=True)
class KeyStatistics:
    """fp32 `[L, H, D]` each, of keys and queries before rotation.

    mean, spread: mean and standard deviation of key channels. query_size: root mean square of the query channels that
        meet them, over the group.
    """

    mean: Tensor
    spread: Tensor
    query_size: Tensor

    def scaled(self, scale: Tensor) -> KeyStatistics:
        """What they become when keys are divided and queries multiplied by `scale` `[L, H, D]`."""
        return KeyStatistics(self.mean / scale, self.spread / scale, self.query_size * scale)


def sample_ids(tokenizer: object, vocab_size: int, most: int = MEASURED_TOKENS) -> list[int]:
    """Token ids of the start of a shipped text; empty where the tokenizer takes no text."""
    if not callable(tokenizer):
        return []
    ids = [int(t) for t in tokenizer(read_text(TEXTS[0])[: 16 * most])["input_ids"]]
    return [t for t in ids if 0 <= t < vocab_size][:most]


@torch.inference_mode()
def measure_keys(decoder: Decoder, token_ids: Sequence[int]) -> KeyStatistics:
    """Run a text of more than 16 tokens through the model, once, and look at every layer's keys and queries."""
    config, device, count = decoder.config, decoder.device, len(token_ids)
    positions = torch.arange(count, device=device)
    lengths = torch.full_like(positions, count)
    cos, sin = decoder.rotary.gather(positions, lengths)
    size = cos[0, 0, : config.head_dim // 2].square() + sin[0, 0, : config.head_dim // 2].square()
    unscaled = float(size.mean())  # 1, but for YaRN's attention factor, whose square turning back leaves behind
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plain = rotate(k.float().contiguous(), cos, -sin)[_FIRST:] / unscaled
        queries = q[_FIRST:].float().square().unflatten(1, (config.num_kv_heads, -1)).mean((0, 2))
        seen.append((plain.mean(0), plain.std(0), queries.sqrt()))
        keys, values = (x.repeat_interleave(config.group_size, 1).transpose(0, 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True)
        return out.transpose(0, 1)

    decoder(torch.tensor(list(token_ids), device=device), positions, attend, lengths)
    mean, spread, query_size = (torch.stack(x) for x in zip(*seen, strict=True))
    return KeyStatistics(mean, spread, query_size)
