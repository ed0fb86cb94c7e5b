"""The few calls of the CUDA driver that loading and launching take, on PyTorch's context and current stream."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from siftkv.errors import SiftKVError
from siftkv.kernels.cuda.device import gpu_of

_MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""

_PROGRAMMATIC_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


_CLUSTER_DIMENSION = 4
"""CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *(
            (name, ctypes.c_uint)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")
        ),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise SiftKVError("libcuda.so.1 was not found: the GPU kernels need NVIDIA's driver") from None


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise SiftKVError(f"the CUDA driver failed to {what}: {(text.value or b'unknown error').decode()}")


def current_stream(device: int | None = None) -> int:
    """The handle of a device's current stream, the current device's by default. `torch.cuda.current_stream` looks at
    the environment each time, which takes the host longer than a launch; a prompt pass has hundreds.
    """
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice() if device is None else device)


class Kernel:
    """One function of a loaded module, launched on the current stream; launches can be captured in a CUDA graph."""

    def __init__(self, function: ctypes.c_void_p, name: str, threads: int, shared_bytes: int) -> None:
        self._function, self._name, self._threads, self._shared = function, name, threads, shared_bytes
        self._starts_early = gpu_of(torch.device("cuda", torch.cuda.current_device())).starts_early
        if shared_bytes:
            _check(
                _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes),
                f"reserve shared memory for {name}",
            )

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure, early: bool = False) -> None:
        """Launch with one by-value argument. Raises SiftKVError when the driver refuses.

        early: the kernel may start before its predecessor in the stream ends, on GPUs that know this; it waits inside
            for what it reads.
        """
        config = _Config(*grid, 1, self._threads, 1, 1, self._shared, current_stream())
        attribute = _Attribute(id=_PROGRAMMATIC_SERIALIZATION, value=1)
        if early and self._starts_early:
            config.attributes, config.count = ctypes.pointer(attribute), 1
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, parameters, None)
        _check(status, f"launch {self._name}")

    def clusters(self, size: int) -> int:
        """Clusters of `size` blocks that a GPU runs at once. Raises SiftKVError when the driver refuses."""
        config = _Config(size, 1, 1, self._threads, 1, 1, self._shared, None)
        attribute = _Attribute(id=_CLUSTER_DIMENSION, value=size, _rest=(ctypes.c_int * 15)(1, 1))
        config.attributes, config.count = ctypes.pointer(attribute), 1
        count = ctypes.c_int()
        status = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config))
        _check(status, f"count the clusters of {self._name}")
        return count.value


class Module:
    """Machine code loaded into the current context, for as long as the object lives."""

    def __init__(self, code: bytes) -> None:
        torch.cuda.current_stream()
        self._handle = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), code), "load the kernels")

    def kernel(self, name: str, threads: int, shared_bytes: int = 0) -> Kernel:
        function = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode()), f"find {name}")
        return Kernel(function, name, threads, shared_bytes)
