"""Putting a prompt's sinks and most recent tokens into the window, bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.kernels import reference
from siftkv.kernels.numba.blocks import head_index
from siftkv.kernels.numba.compile import kernel
from siftkv.kernels.numba.views import SINK_ROWS, WINDOW_ROWS, flat, rows_of, views
from siftkv.kernels.state import CacheState


@kernel
def copy_rows(sizes, window, slot, layer, width, heads, keys, values, score, stride, position):
    """Rows of `width` 16-bit words; strides of keys and values in words too, of `score` (flat `[heads, n]`) in fp32."""
    ring, sinks = sizes[WINDOW_ROWS] - sizes[SINK_ROWS], window[7][slot]
    for h in range(heads):
        first = head_index(sizes, slot, layer, h) * sizes[WINDOW_ROWS]
        for t in range(len(position)):
            row = position[t] if position[t] < sinks else sizes[SINK_ROWS] + position[t] % ring
            k_at, v_at = t * keys[1] + h * keys[2], t * values[1] + h * values[2]
            target = (first + row) * width
            for c in range(width):
                window[0][target + c] = keys[0][k_at + c]
                window[2][target + c] = values[0][v_at + c]
            window[4][first + row] = score[h * stride + t]


def write_window(
    state: CacheState, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor
) -> None:
    """See `siftkv.kernels.reference.write_window`."""
    dtype = state.window_k.dtype
    if not len(k):
        return
    if k.dtype != dtype or v.dtype != dtype or score.dtype != torch.float32 or score.stride(1) != 1:
        reference.write_window(state, layer, slot, k, v, score, position)
        return
    held, size = views(state), dtype.itemsize // 2
    rows = [rows_of(x)[1] for x in (k, v)]
    keys, values = ((words, token * size, head * size) for words, _, token, head in rows)
    width, scores = k.shape[2] * size, flat(score).numpy()
    copy_rows(
        held.sizes,
        held.window,
        slot,
        layer,
        width,
        k.shape[1],
        keys,
        values,
        scores,
        score.stride(0),
        position.contiguous().numpy(),
    )
