"""One prompt, sifted in several ways: its forward pass runs once, since prompt attention is exact whatever is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from siftkv.attention import PrefillAttention, PromptChunk
from siftkv.attention.groups import Sifter
from siftkv.engine.runner import Runner


class _Copies:
    """The `attend` callback of a prompt that is kept in several slots, each as its own sifter says."""

    def __init__(self, runner: Runner, length: int, slots: Sequence[int], sifters: Sequence[Sifter]) -> None:
        self.chunks = [PromptChunk(slot, 0, length, sifter) for slot, sifter in zip(slots, sifters, strict=True)]
        self._each = [PrefillAttention(runner.cache, [chunk]) for chunk in self.chunks]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return [attention(layer, q, k, v) for attention in self._each][-1]


@torch.inference_mode()
def prefill_shared(runner: Runner, prompt: Sequence[int], slots: Sequence[int], sifters: Sequence[Sifter]) -> None:
    """Run a prompt once and keep it in every slot, as if each had been run alone.

    Raises OutOfPages or NumericsError for the first slot that could not keep it.
    """
    device, length = runner.decoder.device, len(prompt)
    copies = _Copies(runner, length, slots, sifters)
    lengths = torch.full((length,), length, device=device)
    runner.decoder(torch.tensor(list(prompt), device=device), torch.arange(length, device=device), copies, lengths)
    deferred = runner.cache.finish_prompts(list(slots), [length] * len(slots))
    for failure in [*(chunk.failure for chunk in copies.chunks), *deferred]:
        if failure is not None:
            raise failure
