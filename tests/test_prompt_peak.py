"""What a long prompt takes at most while it passes through a model, reckoned on tensors without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from siftkv.kernels import fused
from siftkv.models import Decoder
from tests.tiny import tiny_config

GIB = 1 << 30


class Peak(TorchDispatchMode):
    """The most bytes of results that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return out


class OnePass:
    """Operations as kernels of a GPU do them: nothing but their results exists."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


def peak(tokens: int) -> int:
    """Of an 8B shape in bf16, without the weights."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    decoder = Decoder(tiny_config(num_layers=3, max_position=tokens, **shape), torch.bfloat16, "meta")
    ids = torch.zeros(tokens, dtype=torch.int64, device="meta")
    with torch.inference_mode(), Peak() as found:
        decoder(ids, ids, lambda layer, q, k, v: torch.empty(q.shape, dtype=q.dtype, device=q.device), ids)
    return found.bytes


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_body", lambda x: OnePass())


def test_a_prompt_of_131072_tokens_takes_what_its_attention_does() -> None:
    state, attention = 131072 * 4096 * 2, 131072 * (32 + 8) * 128 * 2 + 131072 * (32 + 16) * 128 * 2
    assert state + attention < peak(131072) < 2 * state + attention + GIB / 2  # 14 GiB with an MLP of all rows at once


def test_prompts_of_ordinary_length_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = fused.swiglu_linear
    monkeypatch.setattr("siftkv.models.layer.swiglu_linear", lambda x, *rest: rows.append(len(x)) or linear(x, *rest))
    for tokens, parts in ((8192, 1), (8200, 2), (131072, 16)):
        rows.clear()
        peak(tokens)
        assert len(rows) == 3 * parts
        assert max(rows) - min(rows) <= parts
