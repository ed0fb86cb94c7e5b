"""Results files: every figure with the command, machine, versions and commit that it came from."""

from __future__ import annotations

import operator
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, computed_field, field_validator, model_validator

from siftkv.errors import SiftKVError

_LIBRARIES = ("torch", "transformers", "numba", "numpy")
_COMPARE = {"<=": operator.le, ">=": operator.ge}


def _split_bar(bar: str) -> tuple[str, float]:
    sign, limit = bar[:2], bar[2:]
    if sign not in _COMPARE:
        raise ValueError(f"bar {bar!r} must start with <= or >=, such as '<= 0.3'")
    return sign, float(limit)


class Row(BaseModel):
    """One figure. bar: what it must meet, `<= 0.3` or `>= 0.9` in the same unit; None where nothing is promised."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    value: float | int | str | bool | None
    unit: str = ""
    bar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _never_believe_ok(cls, stored: Any) -> Any:
        """`ok` follows from value and bar, so it is computed again when a file is read."""
        return {k: v for k, v in stored.items() if k != "ok"} if isinstance(stored, dict) else stored

    @field_validator("bar")
    @classmethod
    def _known_bar(cls, bar: str | None) -> str | None:
        if bar is not None:
            _split_bar(bar)
        return bar

    @property
    def limit(self) -> float | None:
        """The bar's number; None without a bar."""
        return None if self.bar is None else _split_bar(self.bar)[1]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool | None:
        """Whether `value` meets `bar`; None without a bar, False for a value that is missing or no number."""
        if self.bar is None:
            return None
        sign, limit = _split_bar(self.bar)
        if isinstance(self.value, (str, bool)) or self.value is None:
            return False
        return bool(_COMPARE[sign](self.value, limit))


class Hardware(BaseModel):
    """The machine. cores: those that this process may use. memory_bytes: of the whole machine. gpu: names or None."""

    cpu: str
    cores: int
    memory_bytes: int
    gpu: list[str] | None


class ResultsFile(BaseModel):
    """What a benchmark or evaluation found. Give `name`, `command`, `rows`, `data`; the rest is read from the machine.

    Example:
        >>> rows = [Row(what="KV bytes", value=0.29, unit="of bf16", bar="<= 0.3")]
        >>> ResultsFile(name="demo", command="siftkv demo", rows=rows, data={"answers": []}).write("demo.json")
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    command: str
    date: str = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    commit: str | None = Field(default_factory=lambda: current_commit())
    hardware: Hardware = Field(default_factory=lambda: current_hardware())
    versions: dict[str, str | None] = Field(default_factory=lambda: current_versions())
    rows: list[Row] = Field(default_factory=list)
    data: Any = None

    @property
    def ok(self) -> bool:
        """Whether every row that has a bar meets it."""
        return all(row.ok is not False for row in self.rows)

    def write(self, path: str | Path) -> None:
        """Write the file as JSON; NaN and infinity become null. Raises SiftKVError when the path cannot be written."""
        try:
            Path(path).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise SiftKVError(f"cannot write {path}: {error.strerror or error}") from error

    @staticmethod
    def read(path: str | Path) -> ResultsFile:
        """Read a file that `write` wrote. Raises SiftKVError for one that is missing or is no results file."""
        try:
            return ResultsFile.model_validate_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SiftKVError(f"cannot read {path} as a results file: {str(error).splitlines()[0]}") from error


def current_commit() -> str | None:
    """Commit of the source tree that this package runs from; None for an installed package.

    `+dirty` follows it where tracked files were changed.
    """
    here = Path(__file__).parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git(here, "rev-parse", "HEAD")
    return f"{commit}+dirty" if commit and _git(here, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def current_hardware() -> Hardware:
    """The machine that this process runs on."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(cpu=_cpu_name(), cores=cores, memory_bytes=memory, gpu=gpus or None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def current_versions() -> dict[str, str | None]:
    """Versions of Python, this package and the libraries that decide its results; None for one that is missing."""
    from siftkv import __version__

    versions: dict[str, str | None] = {"python": sys.version.split()[0], "siftkv": __version__}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
