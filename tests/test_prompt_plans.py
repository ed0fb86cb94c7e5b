"""Prompts are padded for a library that plans for every length that it is given, and nothing else changes."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from siftkv.attention import prefill
from siftkv.attention.prefill import causal_attention, planned_length, ragged_attention
from siftkv.kernels.prompts import PromptBatch


def test_few_lengths_are_planned_for() -> None:
    lengths = range(1, 16385)
    planned = [planned_length(n) for n in lengths]
    assert all(p >= n for p, n in zip(planned, lengths, strict=True))
    assert all(p - n < max(64, n / 16) for p, n in zip(planned, lengths, strict=True))
    assert len(set(planned)) == 80
    assert all(planned_length(n) == n for n in (64, 1024, 4096, 16384, 131072, 100_001))


def test_padding_does_not_blow_up_a_batch_of_short_prompts() -> None:
    assert planned_length(17, prompts=8) == 64
    assert planned_length(17, prompts=480) == 17
    assert planned_length(1300, prompts=12) == 1344
    assert planned_length(16000, prompts=2) == 16000


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> set[torch.Size]:
    """Shapes that the library was asked for; a CPU's attention stands in for it."""
    shapes = set()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shapes.add(q.shape)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, lse[..., None]

    monkeypatch.setattr(prefill, "_planned", attention)
    monkeypatch.setattr(prefill, "_cudnn_gives_lse", lambda q: True)
    return shapes


def made(*lengths: int) -> tuple[tuple[Tensor, Tensor, Tensor], PromptBatch]:
    """Views of a fused projection, as a model's layer gives them."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 8, 16, generator=generator)
    count = len(lengths)
    batch = PromptBatch.of(range(count), lengths, [(0, 0)] * count, [None] * count, torch.device("cpu"))
    return (qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]), batch


@pytest.mark.parametrize("lengths", [(100,), (128,), (70, 70, 70), (65, 90, 128)])
def test_a_padded_prompt_gets_what_it_gets_alone(lengths: tuple[int, ...], planned: set[torch.Size]) -> None:
    (q, k, v), batch = made(*lengths)
    out, lse = ragged_attention(q, k, v, batch)
    assert lse is not None
    assert out.shape == q.shape
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        own = slice(start, start + length)
        with pytest.MonkeyPatch.context() as plain:
            plain.setattr(prefill, "_cudnn_gives_lse", lambda q: False)
            expected, sums = causal_attention(q[own], k[own], v[own])
        torch.testing.assert_close(out[own], expected)
        torch.testing.assert_close(lse[:, own], sums)


def test_prompts_of_like_lengths_share_a_plan(planned: set[torch.Size]) -> None:
    for length in range(1030, 1089):
        (q, k, v), _ = made(length)
        causal_attention(q, k, v)
    assert len(planned) == 1
