"""Tensor maps, by which Hopper's tensor memory accelerator finds boxes of a tensor."""

from __future__ import annotations

import ctypes

from siftkv.kernels.cuda.driver import _check, _driver

MAP_BYTES = 128
_UINT16, _SWIZZLE_128B, _PROMOTE_128B = 1, 3, 2
"""CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B."""


def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """A map (128 bytes) of 16-bit numbers at a device address, innermost dimension first, whose boxes stand in shared
    memory in lines of 128 bytes with pieces of 16 bytes swizzled.

    sizes, box: numbers; strides: bytes of all dimensions but the first, multiples of 16. Raises SiftKVError when the
    driver refuses.
    """
    room = ctypes.create_string_buffer(MAP_BYTES + 64)
    offset = -ctypes.addressof(room) % 64
    rank = len(sizes)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(room) + offset),
        _UINT16,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLE_128B,
        _PROMOTE_128B,
        0,
    )
    _check(status, "make a tensor map")
    return room.raw[offset : offset + MAP_BYTES]
