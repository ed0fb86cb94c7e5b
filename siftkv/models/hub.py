"""Fetching a model from the Hugging Face Hub into the Hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from siftkv.errors import ModelError
from siftkv.models.checkpoint import first_line

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Root files only: many repositories carry a second copy of the weights in another layout.
_WANTED = ["*.json", "model*.safetensors", "tokenizer*", "*.jinja", "merges.txt"]
_UNWANTED = ["*/*", "*.gguf", "*.bin", "*.onnx"]


def is_hub_id(name: str) -> bool:
    """Whether a name has the form `owner/model`."""
    return _HUB_ID.fullmatch(name) is not None


def fetch(name: str) -> Path:
    """The local folder of a Hub model, downloaded if need be.

    Honours HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and HF_TOKEN, as the Hub's client does; `ModelError` where the Hub
    cannot be reached or does not have the model.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:  # the client's transport errors share no base class
        raise ModelError(
            f"There is no folder {name!r}, and the Hugging Face Hub did not give it: {first_line(error)} Check the "
            "name and the network (also HF_HUB_OFFLINE, and HF_TOKEN for a gated model), or pass the path of a folder "
            "or .gguf file."
        ) from error
