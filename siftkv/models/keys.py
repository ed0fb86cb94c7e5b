"""Key scaling: channels are weighed so that quantisation errors fall where queries do not look. Exact and free.

After a rotation of head_dim a quantiser's error is spread evenly over channels, whatever their size. Where keys are
divided and queries multiplied by `s_c`, logits stay what they are, and the expected squared error of a logit is

    sum_c (q_c s_c)^2 * mean_c (sigma_c / s_c)^2,   least at s_c^2 = sigma_c / q_c

(`sigma_c`: spread of key channel c, `q_c`: size of the queries there; by the Cauchy-Schwarz inequality never worse than
s = 1). The two channels of a rotary pair share a scale, so that it commutes with the rotation of positions and can be
folded into the projections; powers of two make that exact in floating point.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.models.decoder import Decoder
from siftkv.models.statistics import KeyStatistics

_MOST_EXPONENT = 4


def key_scales(statistics: KeyStatistics) -> Tensor:
    """fp32 `[L, H, D]`, powers of two, with a geometric mean near 1 in each head."""
    half = statistics.spread.shape[-1] // 2
    spread, size = (
        (x[..., :half].square() + x[..., half:].square()).clamp_min(1e-20).log2() / 2
        for x in (statistics.spread, statistics.query_size)
    )
    exponent = (spread - size) / 2
    exponent = (exponent - exponent.mean(-1, keepdim=True)).round().clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    return torch.exp2(exponent).repeat(1, 1, 2)


@torch.no_grad()
def condition_keys(decoder: Decoder, statistics: KeyStatistics) -> KeyStatistics:
    """Fold the best scales into a decoder's weights, in place and once, and return the statistics that its keys have
    then; later calls change nothing and return what the first one did.
    """
    if decoder.key_statistics is None:
        scale = key_scales(statistics)
        for index, own in enumerate(scale):
            _scale_layer(decoder, index, own)
        decoder.key_statistics = statistics.scaled(scale)
    return decoder.key_statistics


def _scale_layer(decoder: Decoder, index: int, scale: Tensor) -> None:
    """scale: fp32 `[H, D]`."""
    layer, config = decoder.layers[index], decoder.config
    queries = scale.repeat_interleave(config.group_size, 0)
    if layer.qk_norm is not None:  # a norm follows the projections: only what comes after it counts
        layer.qk_norm[: config.num_heads] *= queries.to(layer.qk_norm)
        layer.qk_norm[config.num_heads :] /= scale.to(layer.qk_norm)
        return
    factor = torch.cat([queries, 1 / scale]).flatten().to(layer.qkv)
    layer.qkv[: len(factor)] *= factor[:, None]
    if layer.qkv_bias is not None:
        layer.qkv_bias[: len(factor)] *= factor
