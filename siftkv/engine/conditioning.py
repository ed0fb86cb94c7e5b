"""Conditioning of a loaded model: what makes its keys and values easy to quantise, all of it undone exactly."""

from __future__ import annotations

from siftkv.cache import build_conditioning
from siftkv.kernels.state import Conditioning
from siftkv.models import LoadedModel
from siftkv.models.keys import condition_keys
from siftkv.models.statistics import MEASURED_TOKENS, measure_keys, sample_ids
from siftkv.models.values import condition_values

_LEAST_KINDS = 64
"""Different tokens that a sample must have to say something about keys."""


def condition(model: LoadedModel, mode: str = "full") -> Conditioning:
    """Prepare a model for a quantised cache.

    mode: `full` measures what keys have in common on a short shipped text (one prompt pass), removes that before they
        are quantised, turns them, and folds the scaling of keys and the turning of values into the weights
        (`siftkv.models.keys`, `siftkv.models.values`); `bias` removes a projection bias and nothing else; `none`
        quantises keys as they are. Raises SiftKVError for another mode.
    """
    config, decoder = model.config, model.decoder
    layers = range(config.num_layers)
    biases, spreads = [decoder.key_bias(i) for i in layers], [decoder.key_spread(i) for i in layers]
    if mode == "full":
        ids = sample_ids(model.tokenizer, config.vocab_size, min(MEASURED_TOKENS, config.context_limit))
        if decoder.key_statistics is not None or len(set(ids)) >= _LEAST_KINDS:
            known = decoder.key_statistics or condition_keys(decoder, measure_keys(decoder, ids))
            biases, spreads = list(known.mean), list(known.spread)
    conditioning = build_conditioning(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        decoder.rotary.cos,
        decoder.rotary.sin,
        biases,
        spreads,
        mode,
    )
    if mode == "full":
        condition_values(decoder, conditioning.rotation)
    return conditioning
