"""From a name or a path to a model that can run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from siftkv.errors import ModelError
from siftkv.models import checkpoint, hub, registry
from siftkv.models.config import ModelConfig, token_ids
from siftkv.models.decoder import Decoder
from siftkv.models.weights import WeightFiller

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can run.

    `generation` holds the sampling settings that its makers recommend, those of `temperature`, `top_p`, `top_k`,
    `min_p` and `repetition_penalty` that they name; empty where they recommend greedy decoding or nothing.
    """

    config: ModelConfig
    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    name: str
    generation: Mapping[str, float] = field(default_factory=dict)


def load_model(
    name_or_path: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> LoadedModel:
    """Load a built-in name, a folder (config.json and safetensors), a `.gguf` file, or a Hub id `owner/model`.

    Looked for in this order; write `./name` for a folder that is called like a built-in model.

    dtype: "auto" is the checkpoint's own (bfloat16 for GGUF files, whose weights are dequantised); else float32,
    bfloat16 or float16. Raises `ModelError` for everything that is missing, damaged or not supported; the message says
    what to do.
    """
    device = usable_device(device)
    wanted = parse_dtype(dtype)
    path, name = _locate(str(name_or_path))
    with torch.inference_mode(False), torch.no_grad():
        if path.suffix == ".gguf":
            return _load_gguf(path, name, wanted, device)
        return _load_folder(path, name, wanted, device)


def _locate(name: str) -> tuple[Path, str]:
    """The file or folder to read, and what to call the model."""
    if name in registry.BUILTIN:
        return registry.pull(name), name
    path = Path(name).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if path.suffix == ".gguf":
        return path, path.stem
    if hub.is_hub_id(name) and not path.exists():
        return hub.fetch(name), name
    raise ModelError(
        f"There is no model {name!r}: pass a folder with config.json and safetensors, a .gguf file, a Hub id "
        f"(owner/model), or a built-in name ({', '.join(registry.BUILTIN)})."
    )


def _load_folder(folder: Path, name: str, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    hf_config = checkpoint.read_config(folder)
    config = ModelConfig.from_hf(hf_config)
    tokenizer = checkpoint.read_tokenizer(folder)
    generation = checkpoint.read_generation_config(folder)
    files = checkpoint.weight_files(folder)
    if dtype is None:
        dtype = checkpoint.stored_dtype(hf_config, files)
        dtype = dtype if dtype in DTYPES else torch.float32
    decoder = _filled(config, dtype, device, checkpoint.read_weights(files), str(folder))
    return _loaded(config, decoder, tokenizer, name, generation)


def _load_gguf(path: Path, name: str, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    from siftkv.models.gguf_file import read_gguf

    dtype = dtype or torch.bfloat16
    model = read_gguf(path, dtype)
    tensors = ((key, tensor, str(path)) for key, tensor in model.hf_model.state_dict().items())
    decoder = _filled(model.config, dtype, device, tensors, str(path))
    return _loaded(model.config, decoder, model.tokenizer, name, {})


def _filled(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Iterable[tuple[str, Tensor, str]],
    source: str,
) -> Decoder:
    decoder = Decoder(config, dtype, device)
    filler = WeightFiller(decoder)
    for key, tensor, file in tensors:
        filler.put(key, tensor, file)
    filler.finish(source)
    return decoder


def _loaded(
    config: ModelConfig, decoder: Decoder, tokenizer: Any, name: str, generation: Mapping[str, Any]
) -> LoadedModel:
    """Join what config, generation config and tokenizer know: each may name an end of text that the others do not."""
    if tokenizer.vocab_size > config.vocab_size:  # added tokens may lie beyond: padding tokens often do
        raise ModelError(
            f"The tokenizer of {name} has {tokenizer.vocab_size} tokens, but the model knows {config.vocab_size}: they "
            "do not belong together. Check which model the tokenizer files come from."
        )
    ends = token_ids(config.eos_token_ids, generation.get("eos_token_id"), tokenizer.eos_token_id)
    config = replace(config, eos_token_ids=tuple(i for i in ends if 0 <= i < config.vocab_size))
    decoder.config = config
    sampled = generation.get("do_sample", False)
    settings = {key: generation[key] for key in _SAMPLING if sampled and generation.get(key) is not None}
    return LoadedModel(config, decoder, tokenizer, name, settings)


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The dtype that is meant, None for "auto". Raises `ModelError` for one that models do not run in."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto":
        return None
    if found not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported: use auto, float32, bfloat16 or float16.")
    return found


def usable_device(device: str | torch.device) -> torch.device:
    """A CPU or CUDA device that is here; raises `ModelError` otherwise."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"device {device!r} is not supported: use cpu, cuda or cuda:N.") from error
    if found.type not in ("cpu", "cuda"):
        raise ModelError(f"device {device!r} is not supported: use cpu, cuda or cuda:N.")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("PyTorch finds no CUDA device here: use device='cpu', or install a CUDA build of PyTorch.")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"there is no {found}: PyTorch finds {torch.cuda.device_count()} CUDA devices here.")
    return found
