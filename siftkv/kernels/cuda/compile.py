"""CUDA C++ compiled at run time: NVRTC for the source at hand, results kept on disk, no toolkit needed.

The compiler is the library that PyTorch brings (`nvidia-cuda-nvrtc`). Sources use built-in types and PTX only, so no
headers are read.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from siftkv.errors import SiftKVError
from siftkv.kernels.cuda.device import LOWEST_CAPABILITY, gpu_of

_logger = logging.getLogger(__name__)
_OPTIONS = ("--std=c++17", "--extra-device-vectorization", "--device-as-default-execution-space")


def _candidates() -> Iterator[str]:
    """Places of libnvrtc: beside torch's own libraries first, then whatever the loader finds."""
    major = (torch.version.cuda or "13").split(".")[0]
    name = f"libnvrtc.so.{major}"
    roots = [Path(entry) for entry in sys.path if entry]
    for root in roots:
        for folder in (f"nvidia/cu{major}/lib", "nvidia/cuda_nvrtc/lib", "torch/lib"):
            yield from (str(path) for path in sorted((root / folder).glob(f"{name}*")))
    yield from (name, "libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12")
    yield from (str(path) for path in sorted(Path("/usr/local/cuda/lib64").glob("libnvrtc.so*")))


@cache
def _nvrtc() -> ctypes.CDLL:
    for path in _candidates():
        try:
            # The compiler opens this part of itself by name, and the loader does not look beside it.
            for part in Path(path).parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(part))
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise SiftKVError(
        "libnvrtc, which compiles the GPU kernels, was not found: "
        "install the nvidia-cuda-nvrtc wheel of PyTorch's CUDA version"
    )


def _check(status: int, what: str) -> None:
    if status:
        raise SiftKVError(f"NVRTC failed to {what}: {_nvrtc().nvrtcGetErrorString(status).decode()}")


def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler. Raises SiftKVError where there is none."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "tell its version")
    return major.value, minor.value


def cache_folder() -> Path:
    """Where compiled kernels and choices of algorithms are kept between processes."""
    base = os.environ.get("SIFTKV_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "siftkv" / "kernels"


def architecture(device: torch.device) -> str:
    """What to compile for: `sm_90` and the like, or, for a GPU that is newer than the compiler, `compute_90` and the
    like, the latest that the compiler knows. Raises SiftKVError for a GPU that the kernels cannot run on.
    """
    wanted = gpu_of(device).capability
    if wanted < LOWEST_CAPABILITY:
        raise SiftKVError(
            "the GPU kernels need compute capability 8.0 (Ampere) or later, "
            f"and {torch.cuda.get_device_name(device)} has {wanted[0]}.{wanted[1]}: it has kernels='reference' alone"
        )
    known = max((c for c in known_capabilities() if c <= wanted), default=LOWEST_CAPABILITY)
    own = known == wanted == torch.cuda.get_device_capability(device)
    return f"{'sm' if own else 'compute'}_{known[0]}{known[1]}"


def serves(device: torch.device) -> bool:
    """Whether the kernels run on a GPU: whether it is recent enough and has a compiler. Where not, a warning says why,
    once.
    """
    try:
        architecture(device)
    except SiftKVError as error:
        _warn_of_slowness(str(error))
        return False
    return True


@cache
def _warn_of_slowness(reason: str) -> None:
    _logger.warning("PyTorch's operations take the place of the GPU kernels, which is many times slower: %s", reason)


@cache
def known_capabilities() -> tuple[tuple[int, int], ...]:
    """Compute capabilities that the compiler has code for. Raises SiftKVError where there is no compiler."""
    count = ctypes.c_int()
    _check(_nvrtc().nvrtcGetNumSupportedArchs(ctypes.byref(count)), "count its architectures")
    numbers = (ctypes.c_int * count.value)()
    _check(_nvrtc().nvrtcGetSupportedArchs(numbers), "list its architectures")
    return tuple(divmod(number, 10) for number in numbers)


def compile_cubin(source: str, arch: str) -> bytes:
    """Machine code of `source` for `arch`, or PTX if that is `compute_...`, from the cache folder or compiled now.

    The cache is keyed by source, options, architecture and compiler version. Raises SiftKVError with the compiler's log
    when it does not compile.
    """
    key = hashlib.sha256("\n".join([source, arch, *_OPTIONS, str(nvrtc_version())]).encode()).hexdigest()[:32]
    path = cache_folder() / f"{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = _compile(source, arch)
    _store(path, code)
    return code


def _compile(source: str, arch: str) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"siftkv.cu", 0, None, None), "take a source"
    )
    try:
        options = [option.encode() for option in (*_OPTIONS, f"--gpu-architecture={arch}")]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            raise SiftKVError(f"the GPU kernels do not compile: {_log(program)}")
        kind, size = "CUBIN" if arch.startswith("sm_") else "PTX", ctypes.c_size_t()
        _check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)), "give the code's size")
        code = ctypes.create_string_buffer(size.value)
        _check(getattr(nvrtc, f"nvrtcGet{kind}")(program, code), "give the code")
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _nvrtc().nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _nvrtc().nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


def _store(path: Path, code: bytes) -> None:
    """Atomic, so that processes that start together never read half a file; an unwritable folder costs only time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        return
