"""The two ends of a model pass on a GPU, one launch each: token ids to the first layer's input, logits to tokens."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from siftkv.kernels.cuda.elementwise import Norm, launch


class _Enter(ctypes.Structure):
    """`Enter` of `src/step.cu`, field by field."""

    _fields_ = (
        ("norm", Norm),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "cos_table", "sin_table", "cos", "sin")),
        *((name, ctypes.c_int) for name in ("vocab", "places", "dim")),
    )


class _Choose(ctypes.Structure):
    """`Choose` of `src/step.cu`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "not_finite", "slots", "counters", "out")),
        *((name, ctypes.c_int) for name in ("requests", "vocab")),
    )


def enter(
    token_ids: Tensor, positions: Tensor, embedding: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `siftkv.kernels.fused.enter`. Ids and positions outside their tables are moved to the nearest end."""
    token_ids, positions = token_ids.contiguous(), positions.contiguous()
    tokens, (vocab, size), (places, half) = len(token_ids), embedding.shape, cos.shape
    x, normed = embedding.new_empty(2, tokens, size)
    factors = cos.new_empty(2, tokens, 1, 2 * half)
    norm = Norm(embedding.data_ptr(), None, weight.data_ptr(), x.data_ptr(), normed.data_ptr(), eps, size)
    pointers = (t.data_ptr() for t in (token_ids, positions, cos, sin, factors[0], factors[1]))
    launch(embedding, "enter", tokens, _Enter(norm, *pointers, vocab, places, 2 * half))
    return x, normed, factors[0], factors[1]


def choose(logits: Tensor, not_finite: Tensor, slots: Tensor, counters: Tensor) -> Tensor:
    """The likeliest token of each request (the first of equals), and what the host asks about a step, in one tensor.

    logits: 16-bit `[B, vocab]`; not_finite: bool `[S]`; slots: int64 `[B]`; counters: int64 `[2]`. Returns int64
    `[2 B + 2]`: tokens, then 1 where neither the request's cache nor its logits hold a fault (NaN, or a largest logit
    that is infinite), then the counters.
    """
    logits, slots = logits.contiguous(), slots.contiguous()
    requests, vocab = logits.shape
    out = torch.empty(2 * requests + 2, dtype=torch.int64, device=logits.device)
    pointers = (t.data_ptr() for t in (logits, not_finite, slots, counters, out))
    launch(logits, "choose", requests, _Choose(*pointers, requests, vocab))
    return out
