"""How many layers' keys and values exist at the model's precision at once while a prompt is prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from siftkv.attention import PrefillAttention, PromptChunk
from siftkv.engine.llm import LLM
from siftkv.models import Attend
from siftkv.policies import Policy


@dataclass(frozen=True)
class PromptMemory:
    """What a prompt of `tokens` tokens takes while it is prefilled.

    peak_layers: the most layers whose keys or values existed at once. layer_bytes: K and V of one layer's prompt.
    sifted_bytes: what the cache keeps of the prompt in the end, tables and window included. bf16_bytes: a plain 16-bit
    cache of the prompt.
    """

    tokens: int
    peak_layers: int
    layer_bytes: int
    sifted_bytes: int
    bf16_bytes: int

    @property
    def peak_bytes(self) -> int:
        """An upper bound on the bytes of keys and values: all that is kept, and the layers at full precision."""
        return self.sifted_bytes + self.peak_layers * self.layer_bytes


def trace_prompt(llm: LLM, prompt_ids: Sequence[int], policy: Policy) -> PromptMemory:
    """Prefill one prompt as the engine does and watch the storages of its keys and values. Nothing stays in the cache.

    Raises what prefilling raises: RequestError, OutOfPages, NumericsError.
    """
    llm.engine.check_prompt(list(prompt_ids))
    cache, decoder, bound = llm.cache, llm.model.decoder, llm.engine.bind(policy)
    slot = cache.admit(bound.rule)
    try:
        chunk = PromptChunk(slot, 0, len(prompt_ids), bound)
        positions = torch.arange(len(prompt_ids), device=decoder.device)
        token_ids = torch.tensor(list(prompt_ids), device=decoder.device)
        lengths = torch.full_like(positions, len(prompt_ids))
        watch = _Watch(PrefillAttention(cache, [chunk]))
        with torch.inference_mode(), watch:
            decoder(token_ids, positions, watch.attend, lengths)
        if chunk.failure is not None:
            raise chunk.failure
        held = int(cache.request_bytes(cache.state.seen.new_tensor([slot]))[0])
        return PromptMemory(
            len(prompt_ids), watch.peak_layers, watch.layer_bytes, held, cache.spec.bf16_bytes(len(prompt_ids))
        )
    finally:
        cache.release([slot])


@dataclass
class _Layer:
    """Storages of one layer's K and V. born, died: operation that made the first, and in which the last was freed."""

    storages: list[Any]
    born: int
    died: float = field(default=float("inf"))


class _Watch(TorchDispatchMode):
    """Counts operations, remembers in which of them each storage was made, and sees after each which layers are gone.

    Layers are known only when `attend` is called, but their values exist since the projection before it: so births are
    looked up then, and a layer that died in between still counts as alive at the same time.
    """

    def __init__(self, attend: Attend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_layers = 0
        self.layer_bytes = 0
        self._attend = attend
        self._operation = 0
        self._born: dict[int, int] = {}
        self._layers: list[_Layer] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        storages = [StorageWeakRef(t.untyped_storage()) for t in (k, v)]
        new = _Layer(storages, min(self._born.get(s.cdata, self._operation) for s in storages))
        self._mark_dead()
        self._layers = [known for known in self._layers if known.died > new.born]
        self._layers.append(new)
        self.peak_layers = max(self.peak_layers, len(self._layers))
        self.layer_bytes = k.numel() * k.element_size() + v.numel() * v.element_size()
        return self._attend(layer, q, k, v)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self._operation += 1
        self._mark_dead()
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in taken:
                self._born[tensor.untyped_storage()._cdata] = self._operation
        return out

    def _mark_dead(self) -> None:
        for layer in self._layers:
            if layer.died == float("inf") and all(s.expired() for s in layer.storages):
                layer.died = self._operation
