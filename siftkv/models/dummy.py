"""A model of a folder's shape with random weights: for measuring speed where the weights are not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from siftkv.models import checkpoint
from siftkv.models.config import ModelConfig
from siftkv.models.loading import DTYPES, LoadedModel, parse_dtype, usable_device
from siftkv.models.random_weights import random_model

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def dummy_model(
    folder: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu", seed: int = 0
) -> LoadedModel:
    """A model of the shape in a folder's `config.json`, with random weights. The same seed gives the same weights.

    Its tokenizer is the folder's, or where there is none `number_tokenizer`. dtype: "auto" is that of the config, else
    float32. Raises `ModelError` for a folder without a config that the decoder can run, and as `load_model` does for
    dtype and device.
    """
    folder, found, wanted = Path(folder).expanduser(), usable_device(device), parse_dtype(dtype)
    hf_config = checkpoint.read_config(folder)
    config = ModelConfig.from_hf(hf_config)
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZERS)
    tokenizer = checkpoint.read_tokenizer(folder) if has_tokenizer else number_tokenizer(config.vocab_size)
    if wanted is None:
        named = getattr(hf_config, "dtype", None)
        named = getattr(torch, named, None) if isinstance(named, str) else named
        wanted = named if named in DTYPES else torch.float32
    with torch.inference_mode(False), torch.no_grad():
        decoder = random_model(config, seed, wanted, found)
    return LoadedModel(config, decoder, tokenizer, folder.resolve().name)


def number_tokenizer(vocab_size: int) -> Any:
    """A `transformers` tokenizer whose token `n` is the word "n"; every other word is token 0."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(n): n for n in range(vocab_size)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)
