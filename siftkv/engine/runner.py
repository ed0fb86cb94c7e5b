"""Model passes over the cache: prompts, and one token of each running request."""

from __future__ import annotations

from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from siftkv.attention import PrefillAttention, PromptChunk
from siftkv.attention.decode import choosers
from siftkv.attention.groups import Sifter
from siftkv.cache import KVCache
from siftkv.engine.graphs import DecodeGraphs, decode_step
from siftkv.errors import SiftKVError
from siftkv.models import Decoder

Values = list[int] | npt.NDArray[np.int64]


class Runner:
    """Runs a decoder over a cache. Knows slots and token ids; requests, policies and sampling are others' business."""

    def __init__(self, decoder: Decoder, cache: KVCache, graphs: DecodeGraphs | None = None) -> None:
        self.decoder = decoder
        self.cache = cache
        self.graphs = graphs

    @torch.inference_mode()
    def prefill(
        self, prompts: list[list[int]], slots: list[int], sifters: list[Sifter]
    ) -> tuple[Tensor, list[SiftKVError | None]]:
        """Run prompts laid end to end and keep what their sifters say.

        Returns logits fp32 `[B, vocab]` after the last token of each, and for each prompt why it could not be kept
        (OutOfPages, NumericsError), or None.
        """
        lengths = [len(p) for p in prompts]
        ends = list(accumulate(lengths))
        starts = [end - n for end, n in zip(ends, lengths, strict=True)]
        chunks = [PromptChunk(*x) for x in zip(slots, starts, lengths, sifters, strict=True)]
        device = self.decoder.device
        token_ids = self._on_device(np.fromiter(chain.from_iterable(prompts), np.int64, ends[-1]))
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        per_token = torch.cat([torch.full((n,), n, device=device) for n in lengths])
        last = self._on_device([end - 1 for end in ends])
        hidden = self.decoder(token_ids, positions, PrefillAttention(self.cache, chunks), per_token)
        logits = self.decoder.logits(hidden[last])
        deferred = self.cache.finish_prompts(slots, lengths)
        return logits, [chunk.failure or later for chunk, later in zip(chunks, deferred, strict=True)]

    @torch.inference_mode()
    def decode(self, token_ids: list[int], slots: list[int]) -> tuple[Tensor, Tensor]:
        """Feed one token to each request: logits fp32 `[B, vocab]`, and bool `[B]`, false where keys or values were not
        finite.

        The caller made sure that the pages of the step are free (`KVCache.step_page_bound`).
        """
        if self.graphs is not None and not choosers(self.cache):
            return self.graphs.run(_pinned(token_ids), _pinned(slots))
        tokens, at = (self._on_device(values) for values in (token_ids, slots))
        logits = decode_step(self.decoder, self.cache, tokens, at)
        return logits.float(), self.cache.finite(at)

    def _on_device(self, values: Values) -> Tensor:
        """int64 on the model's device, without waiting for it."""
        device = self.decoder.device
        return _pinned(values).to(device, non_blocking=True) if device.type == "cuda" else torch.as_tensor(values)


def _pinned(values: Values) -> Tensor:
    """int64 in pinned memory: its copy to the device does not wait."""
    return torch.as_tensor(values).pin_memory()
