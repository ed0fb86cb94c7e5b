"""cuBLASLt, as far as linear layers need it: one product of given sizes, the algorithms that the library proposes for
it, and its launch by one of them.

The library is the one that PyTorch has loaded. Numbers are those of `cublasLt.h`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from siftkv.errors import SiftKVError
from siftkv.kernels.cuda.driver import current_stream

WORKSPACE_BYTES = 32 << 20
"""Most that an algorithm may ask for to pass parts of sums between its blocks."""

_DTYPES = {torch.bfloat16: 14, torch.float16: 2}
_FLOAT, _COMPUTE_FLOAT = 0, 68
_DESC_TRANSPOSE_A, _DESC_EPILOGUE, _DESC_BIAS = 3, 7, 8
_TRANSPOSED, _EPILOGUE_BIAS = 1, 4
_PREFER_WORKSPACE, _PREFER_REDUCTIONS = 1, 3
_EXACT_REDUCTIONS = 0b011
"""Parts of sums stay fp32: `INPLACE` and `COMPUTE_TYPE`, both in a fixed order."""
_CONFIG_SPLITS = 2
_PROPOSALS = 32
_FUNCTIONS = ("Create", "Matmul", "MatmulAlgoCheck", "MatmulAlgoGetHeuristic", "MatmulAlgoConfigGetAttribute")
_WORKSPACE_LIMITS = (0, 4 << 20, WORKSPACE_BYTES)
"""The library proposes a few algorithms for each."""


class Algorithm(ctypes.Structure):
    """`cublasLtMatmulAlgo_t`: opaque; it may be stored and means the same to the same version of the library."""

    _fields_ = (("words", ctypes.c_uint64 * 8),)

    @property
    def text(self) -> str:
        """What it is stored as."""
        return bytes(self).hex()

    @classmethod
    def parse(cls, text: str) -> Algorithm:
        """Of `text`. Raises ValueError for anything else."""
        return cls.from_buffer_copy(bytes.fromhex(text))

    @property
    def splits(self) -> int:
        """Parts that each sum is computed in; 1 = one after another, in the order of the inputs."""
        value = ctypes.c_uint32(1)
        written = ctypes.c_size_t()
        function = _library().cublasLtMatmulAlgoConfigGetAttribute
        status = function(ctypes.byref(self), _CONFIG_SPLITS, ctypes.byref(value), ctypes.c_size_t(4), _out(written))
        return value.value if status == 0 else 0


class _Found(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def _library() -> Any:
    """The loaded library. Raises SiftKVError where PyTorch has loaded none, or one without the functions used here."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        for name in _FUNCTIONS:
            getattr(library, f"cublasLt{name}")
    except (OSError, AttributeError) as error:
        raise SiftKVError(f"cuBLASLt is not to be had: {error}") from error
    return library


def version() -> int:
    """Of the library. Raises SiftKVError where there is none."""
    return int(_library().cublasLtGetVersion())


def _out(value: Any) -> Any:
    return ctypes.byref(value)


def _check(status: int, what: str) -> None:
    if status:
        raise SiftKVError(f"cuBLASLt failed to {what} (status {status})")


@cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(_out(handle)), "start")
    return handle


_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)
_bias_lock = threading.Lock()
"""A product's description holds the address of the bias until it is launched."""


class Product:
    """`x @ weight.T + bias` on one device: x `[rows, inputs]`, weight `[outputs, inputs]`, bias `[outputs]` or none."""

    def __init__(self, device: int, dtype: torch.dtype, rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
        # The library's matrices are stored by columns: out^T = weight x^T.
        self._handle, self._dtype, self._has_bias = _handle(device), dtype, has_bias
        self._made: list[tuple[Any, ctypes.c_void_p]] = []
        self._desc = self._make("MatmulDesc", ctypes.c_int(_COMPUTE_FLOAT), ctypes.c_int(_FLOAT))
        self._describe(_DESC_TRANSPOSE_A, ctypes.c_int32(_TRANSPOSED))
        if has_bias:
            self._describe(_DESC_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
        self._weight = self._layout(inputs, outputs)
        self._x = self._layout(inputs, rows)
        self._out = self._layout(outputs, rows)

    def _make(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        _check(getattr(_library(), f"cublasLt{kind}Create")(_out(made), *arguments), f"make a {kind}")
        self._made.append((getattr(_library(), f"cublasLt{kind}Destroy"), made))
        return made

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        sizes = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        return self._make("MatrixLayout", ctypes.c_int(_DTYPES[self._dtype]), *sizes)

    def _describe(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check(
            _library().cublasLtMatmulDescSetAttribute(self._desc, attribute, _out(value), size), "describe a product"
        )

    def __del__(self) -> None:
        for destroy, made in self.__dict__.get("_made", ()):  # the interpreter's end may have taken the module's names
            destroy(made)

    def proposals(self) -> list[Algorithm]:
        """Algorithms that the library thinks suitable, its favourite first."""
        found: dict[str, Algorithm] = {}
        for limit in reversed(_WORKSPACE_LIMITS):
            for algorithm in self._ask(limit):
                found.setdefault(algorithm.text, algorithm)
        return list(found.values())

    def _ask(self, workspace: int) -> list[Algorithm]:
        preference, results, count = ctypes.c_void_p(), (_Found * _PROPOSALS)(), ctypes.c_int()
        _check(_library().cublasLtMatmulPreferenceCreate(_out(preference)), "make a preference")
        try:
            for attribute, value in (
                (_PREFER_WORKSPACE, ctypes.c_uint64(workspace)),
                (_PREFER_REDUCTIONS, ctypes.c_uint32(_EXACT_REDUCTIONS)),
            ):
                size = ctypes.c_size_t(ctypes.sizeof(value))
                status = _library().cublasLtMatmulPreferenceSetAttribute(preference, attribute, _out(value), size)
                _check(status, "state a preference")
            operands = (self._desc, self._weight, self._x, self._out, self._out, preference)
            status = _library().cublasLtMatmulAlgoGetHeuristic(
                self._handle, *operands, _PROPOSALS, results, _out(count)
            )
            # A product for which nothing is proposed is one that the caller computes otherwise.
            return [Algorithm.parse(r.algorithm.text) for r in results[: count.value] if not (status or r.status)]
        finally:
            _library().cublasLtMatmulPreferenceDestroy(preference)

    def workspace(self, algorithm: Algorithm) -> int | None:
        """Bytes of work space that an algorithm takes here, None where it cannot compute this product."""
        result = _Found()
        operands = (self._desc, self._weight, self._x, self._out, self._out)
        status = _library().cublasLtMatmulAlgoCheck(self._handle, *operands, _out(algorithm), _out(result))
        fits = not status and not result.status and result.workspace <= WORKSPACE_BYTES
        return int(result.workspace) if fits else None

    def launch(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, algorithm: Algorithm, space: Tensor | None
    ) -> None:
        """Compute into `out` on the current stream; may be captured. space: bytes of work space, at least
        as many as the algorithm takes here. Raises SiftKVError where the library refuses.
        """
        if bias is None:
            self._launch(x, weight, out, algorithm, space)
            return
        with _bias_lock:
            self._describe(_DESC_BIAS, ctypes.c_void_p(bias.data_ptr()))
            self._launch(x, weight, out, algorithm, space)

    def _launch(self, x: Tensor, weight: Tensor, out: Tensor, algorithm: Algorithm, space: Tensor | None) -> None:
        address = ctypes.c_void_p(out.data_ptr())
        status = _library().cublasLtMatmul(
            self._handle,
            self._desc,
            _out(_ONE),
            ctypes.c_void_p(weight.data_ptr()),
            self._weight,
            ctypes.c_void_p(x.data_ptr()),
            self._x,
            _out(_ZERO),
            address,
            self._out,
            address,
            self._out,
            _out(algorithm),
            ctypes.c_void_p(None if space is None else space.data_ptr()),
            ctypes.c_size_t(0 if space is None else space.nbytes),
            ctypes.c_void_p(current_stream(x.device.index)),
        )
        _check(status, "multiply")


@lru_cache(maxsize=2048)
def product(device: int, dtype: torch.dtype, rows: int, outputs: int, inputs: int, has_bias: bool) -> Product:
    """The product of these sizes. Raises SiftKVError where the library is missing."""
    return Product(device, dtype, rows, outputs, inputs, has_bias)
