"""Runs code that a model wrote: a process of its own, an empty folder, limits on time, memory and files, no network
where the machine can take it away.

This protects against accidents, not against attacks: the process may still read what the user may read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

_LAUNCHER = """\
import resource, runpy
seconds, memory, files = {limits}
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (files, files))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
runpy.run_path("program.py", run_name="__main__")
"""
_FILE_BYTES = 16 << 20
_SHOWN = 400
"""Characters of an error message that are kept."""

Verdict = Literal["passed", "failed", "timeout"]


@dataclass(frozen=True)
class Limits:
    """seconds: of wall-clock time, and of processor time. memory_bytes: of address space."""

    seconds: int = 10
    memory_bytes: int = 2 << 30


@dataclass(frozen=True)
class CodeResult:
    """Whether a program ran to its last line. message: the end of its error output."""

    verdict: Verdict
    message: str = ""


@lru_cache(maxsize=1)
def network_guard() -> tuple[str, ...]:
    """The command that starts a process without a network; empty where this machine has none that works."""
    tool = shutil.which("unshare")
    for options in (("-n",), ("-r", "-n")) if tool else ():
        try:
            done = subprocess.run([str(tool), *options, "true"], capture_output=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return (str(tool), *options)
    return ()


def run_code(program: str, limits: Limits | None = None) -> CodeResult:
    """Run a program, `passed` when it gets to its end without an exception and without leaving early.

    Its output is thrown away, its folder is removed, and whatever it started is killed.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="siftkv-code-", ignore_cleanup_errors=True) as folder:
        Path(folder, "program.py").write_text(f"{program}\n\nopen('done', 'w').write('{token}')\n", "utf-8")
        launcher = _LAUNCHER.format(limits=(limits.seconds, limits.memory_bytes, _FILE_BYTES))
        command = [*network_guard(), sys.executable, "-I", "-c", launcher]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            timed_out = _wait(process, limits.seconds)
            errors.seek(0)
            message = errors.read(1 << 20).decode("utf-8", "replace").strip()[-_SHOWN:]
        done = Path(folder, "done")
        passed = done.is_file() and done.stat().st_size == len(token) and done.read_text("utf-8") == token
    if timed_out or process.returncode == -signal.SIGXCPU:
        return CodeResult("timeout", f"longer than {limits.seconds} s")
    return CodeResult("passed" if passed and process.returncode == 0 else "failed", message)


def _wait(process: subprocess.Popen[bytes], seconds: int) -> bool:
    """Wait for a process, then kill its group; whether it took too long."""
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        return True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
