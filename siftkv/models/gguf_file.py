"""Reading a GGUF file through `transformers`, whose reader dequantises the weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import gguf
import torch

from siftkv.errors import ModelError
from siftkv.models.checkpoint import first_line
from siftkv.models.config import ModelConfig
from siftkv.models.rope import llama3_factors
from siftkv.models.rope_config import RopeConfig

# What Meta published for Llama 3.1 and 3.2; a GGUF file keeps only the frequency factors that follow from them.
LLAMA3_LOW_FREQ, LLAMA3_HIGH_FREQ, LLAMA3_LENGTH = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True)
class GgufModel:
    """`hf_model` is a `transformers` model with dense weights, `config` what the file really says (RoPE scaling
    included).
    """

    config: ModelConfig
    hf_model: Any
    tokenizer: Any


def read_gguf(path: Path, dtype: torch.dtype) -> GgufModel:
    """Read and dequantise one GGUF file into `dtype`; `ModelError` where it is missing, damaged or of an unsupported
    family.
    """
    import transformers

    if not path.is_file():
        raise ModelError(f"There is no GGUF file at {path}. Check the path.")
    arguments: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        reader = gguf.GGUFReader(path)
        with quiet():
            hf_config = transformers.AutoConfig.from_pretrained(path.parent, **arguments)
            tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **arguments)
        _name_special_tokens(tokenizer, reader)
    except Exception as error:  # the reader raises whatever a damaged header makes it stumble over
        raise ModelError(
            f"{path} cannot be read as GGUF: {first_line(error)} Download it again or use safetensors."
        ) from error
    config = _with_rope(ModelConfig.from_hf(_without_quantisation(hf_config)), reader, path)
    try:
        with quiet():
            hf_model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, dtype=dtype, output_loading_info=True, **arguments, **_dequantise(transformers)
            )
    except Exception as error:  # as above
        raise ModelError(
            f"{path} cannot be read as GGUF: {first_line(error)} Download it again or use safetensors."
        ) from error
    missing = sorted(set(info["missing_keys"]) - ({"lm_head.weight"} if config.tie_embeddings else set()))
    if missing:
        raise ModelError(f"{path} lacks {missing[0]}: the file is incomplete. Download it again.")
    _without_quantisation(hf_model.config)
    return GgufModel(config, hf_model, tokenizer)


def _name_special_tokens(tokenizer: Any, reader: Any) -> None:
    """Some releases of `transformers` swap the begin and the end of text of a GGUF file."""
    keys = gguf.Keys.Tokenizer
    for role, key in (("bos", keys.BOS_ID), ("eos", keys.EOS_ID), ("unk", keys.UNK_ID), ("pad", keys.PAD_ID)):
        field = reader.get_field(key)
        if field is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))


def _dequantise(transformers: Any) -> dict[str, Any]:
    """From some 5.x on weights stay packed unless told otherwise."""
    config_class = getattr(transformers, "GgufConfig", None)
    if config_class is None or "dequantize" not in inspect.signature(config_class).parameters:
        return {}
    return {"quantization_config": config_class(dequantize=True)}


def _without_quantisation(hf_config: Any) -> Any:
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    return hf_config


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of `transformers`, one of which knows no switch."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _with_rope(config: ModelConfig, reader: Any, path: Path) -> ModelConfig:
    """`transformers` passes over a file's RoPE scaling, which would be wrong beyond the first few thousand tokens."""
    architecture = reader.get_field("general.architecture").contents()

    def field(name: str) -> Any:
        found = reader.get_field(f"{architecture}.rope.scaling.{name}")
        return None if found is None else found.contents()

    factors = next((tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is not None:
        return replace(config, rope=_llama3(config, torch.tensor(factors), path))
    kind, length = field("type") or "none", config.max_position
    if kind == "none":
        return config
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{path}: RoPE scaling {kind!r} in GGUF is not supported: use the model's safetensors release."
        )
    factor = float(field("factor") or 1.0)
    original = int(field("original_context_length") or length / factor)
    rope = RopeConfig(type=kind, theta=config.rope.theta, factor=factor, original_max_position=original)
    return replace(config, rope=rope)  # GGUF's context_length is the extended one, so max_position stands


def _llama3(config: ModelConfig, factors: torch.Tensor, path: Path) -> RopeConfig:
    rope = RopeConfig(
        type="llama3",
        theta=config.rope.theta,
        factor=float(factors.max()),
        original_max_position=LLAMA3_LENGTH,
        low_freq_factor=LLAMA3_LOW_FREQ,
        high_freq_factor=LLAMA3_HIGH_FREQ,
    )
    expected = llama3_factors(replace(config, rope=rope))
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise ModelError(
            f"{path}: its RoPE frequency factors are not those of Llama 3: use the safetensors release of this model."
        )
    return rope
