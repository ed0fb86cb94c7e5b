"""Reading a Hugging Face folder: config.json, safetensors, generation_config.json, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from siftkv.errors import ModelError
from siftkv.models.config import SUPPORTED_ARCHITECTURES

INDEX = "model.safetensors.index.json"


def read_config(folder: Path) -> Any:
    """The `transformers` config of a folder; `ModelError` where it is missing, unreadable or of an unknown type."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder. Check the path.")
    read_json(folder / "config.json")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for a config that it does not like
        raise ModelError(
            f"{folder / 'config.json'} cannot be used: {first_line(error)} "
            f"Supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
        ) from error


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; `ModelError` where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        raise ModelError(
            f"{folder} has no usable tokenizer: {first_line(error)} "
            "Copy tokenizer.json and tokenizer_config.json of the model there."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; `ModelError` where the file is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {first_line(error)} Download it again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object. Download it again.")
    return content


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or nothing where a model has none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order; `ModelError` where there are none or one of the index is missing."""
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{folder / INDEX} lists no files. Download it again.")
        files = [folder / name for name in sorted(set(shards.values()))]
    else:
        files = [folder / "model.safetensors"]
        if not files[0].is_file():
            files = sorted(folder.glob("*.safetensors"))
        if len(files) > 1:
            raise ModelError(f"{folder} has several safetensors files but no {INDEX}. Download the folder again.")
    if not files:
        raise ModelError(
            f"{folder} has no safetensors weights. Only safetensors and GGUF are read: convert the weights first."
        )
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing, though {INDEX} lists it. Download it again.")
    return files


def read_weights(files: list[Path]) -> Iterator[tuple[str, Tensor, str]]:
    """(name, tensor, file) of every tensor, memory-mapped: nothing is copied here. A damaged file is a `ModelError`."""
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    yield name, tensors.get_tensor(name), str(file)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged or cut short: {first_line(error)} Download it again.") from error


def stored_dtype(hf_config: Any, files: list[Path]) -> torch.dtype:
    """The dtype that a checkpoint means to run in: its config's, else that of its first tensor."""
    named = getattr(hf_config, "dtype", None)
    if isinstance(named, str):
        named = getattr(torch, named, None)
    if isinstance(named, torch.dtype):
        return named
    for _, tensor, _ in read_weights(files):
        return tensor.dtype
    raise ModelError(f"{files[0]} holds no tensors. Download it again.")


def first_line(error: BaseException) -> str:
    """The first line of an error's message as a sentence."""
    text = f"no {error} in it" if isinstance(error, KeyError) else str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0].rstrip(".") + "."
