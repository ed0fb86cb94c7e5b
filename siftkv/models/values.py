"""Value conditioning: what makes values easier to quantise, folded into the weights: exact, free at run time.

Attention is a weighted mean of values, and the output projection is linear. So, per kv head:

- the bias of the value projection, which every value carries, moves behind the output projection, since the weights of
  a mean add up to one;
- values live in a rotated basis, `v' = v R`, and the output projection undoes it, `W_o' = W_o R`. A signed Hadamard `R`
  spreads outlier channels (as in QuaRot, arXiv 2404.00456), which narrows the range that low-bit codes must span.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from siftkv.models.decoder import Decoder
from siftkv.models.layer import DecoderLayer


@torch.no_grad()
def condition_values(decoder: Decoder, rotation: Tensor) -> None:
    """Fold value conditioning into a decoder's weights, in place and once; later calls change nothing.

    rotation: fp32 `[D, D]`, orthogonal. In 16 bits the folded weights are rounded once more, like any weight.
    """
    if not decoder.values_conditioned:
        for layer in decoder.layers:
            _condition_layer(decoder, layer, rotation.to(layer.qkv.device))
        decoder.values_conditioned = True


def _condition_layer(decoder: Decoder, layer: DecoderLayer, rotation: Tensor) -> None:
    config = decoder.config
    heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
    start = (config.num_heads + heads) * dim
    value = layer.qkv[start:].float().view(heads, dim, -1)  # [H, D, E]
    out = layer.o.float().view(-1, heads, group, dim)  # [E, H, G, D]
    if layer.qkv_bias is not None:
        bias = layer.qkv_bias[start:].float().view(heads, dim)
        moved = torch.einsum("ehgd,hd->e", out, bias)
        known = 0.0 if layer.o_bias is None else layer.o_bias.float()
        layer.o_bias = Parameter((moved + known).to(layer.o.dtype), requires_grad=False)
        layer.qkv_bias[start:] = 0
    layer.qkv[start:] = torch.einsum("hde,df->hfe", value, rotation).reshape(heads * dim, -1).to(layer.qkv.dtype)
    layer.o.copy_((out @ rotation).reshape(layer.o.shape))
