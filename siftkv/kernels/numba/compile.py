"""How functions are compiled: `kernel` for what Python calls, `inner` and `inlined` for what only kernels call.

Kernels release the GIL, are kept on disk, and own no arrays, so reference counting is off; inner functions have no
Python entry. Both halve the time of compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

inner = njit(error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
inlined = njit(error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


def _sources() -> tuple[float, int]:
    """Newest change and total size of this package's files."""
    stats = [path.stat() for path in Path(__file__).parent.glob("*.py")]
    return max(x.st_mtime for x in stats), sum(x.st_size for x in stats)


_STAMP = _sources()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a kernel at its first call, or take it from numba's cache on disk.

    numba compares the age of the kernel's own file only; here a change of any file of the package counts, because
    inner functions are compiled into the kernels that call them.
    """
    compiled = njit(cache=True, nogil=True, error_model="numpy", _nrt=False)(function)
    kept = getattr(compiled._cache, "_cache_file", None)
    if kept is not None:
        kept._source_stamp = _STAMP
    return compiled
