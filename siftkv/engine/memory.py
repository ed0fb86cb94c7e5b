"""How much of a GPU's memory the KV cache may take: what the model and its passes leave, measured."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from siftkv.attention.prefill import causal_attention
from siftkv.errors import SiftKVError
from siftkv.models import Decoder

_RESERVE = 640 << 20
"""Bytes left for what cannot be measured beforehand: work space of libraries and products, kernels compiled later."""


def cache_budget(
    decoder: Decoder, utilization: float, max_batched_tokens: int, max_num_seqs: int, max_model_len: int
) -> int:
    """Bytes that the cache may take so that a GPU is used up to `utilization` of its memory.

    The largest pass over prompts, the longest prompt (which runs whole, however long it is) and the largest decode step
    are run once without a cache: peaks of passes must fit beside the cache, and the step's stays in the memory of
    captured graphs. Raises SiftKVError when the share is not one, or nothing is left.
    """
    if not 0 < utilization <= 1:
        raise SiftKVError(f"gpu_memory_utilization={utilization}: use a share above 0 and at most 1")
    device = decoder.device
    length = min(max_batched_tokens, max_model_len)
    prompts = max(1, max_batched_tokens // length)
    prompt_pass = _peak(decoder, [length] * prompts)
    if max_model_len > length:
        prompt_pass = max(prompt_pass, _peak(_first_layers(decoder), [max_model_len]))
    decode_step = _peak(decoder, [1] * max_num_seqs)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * utilization) - (total - free) - prompt_pass - decode_step - _RESERVE
    if budget <= 0:
        raise SiftKVError(
            f"no memory is left for a KV cache: of {total >> 20} MiB, {(total - free) >> 20} are in use and passes "
            f"take {(prompt_pass + decode_step) >> 20}; lower max_model_len ({max_model_len} tokens), "
            "max_num_batched_tokens or max_num_seqs, raise gpu_memory_utilization, or free the GPU"
        )
    return budget


def _first_layers(decoder: Decoder) -> Decoder:
    """A model of two layers, which takes as much memory for a pass as one of all: 131,072 tokens of an 8B shape would
    take 10 s through all of them.
    """
    shallow = copy.copy(decoder)
    shallow.layers = decoder.layers[:2]
    return shallow


@torch.inference_mode()
def _peak(decoder: Decoder, lengths: list[int]) -> int:
    """Bytes that a pass over prompts of these lengths takes at most beside what is held already."""
    device = decoder.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    counts = torch.tensor(lengths, device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(lengths) == len(q):
            return torch.empty_like(q)
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([causal_attention(*part)[0] for part in parts])

    hidden = decoder(torch.zeros_like(positions), positions, attend, counts.repeat_interleave(counts))
    decoder.logits(hidden[counts.cumsum(0) - 1])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
