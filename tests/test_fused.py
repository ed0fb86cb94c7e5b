"""The decoder's fused arithmetic on a CPU: the compiled bodies against PyTorch, at most one rounding step apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from siftkv.kernels import fused
from siftkv.kernels.numba import elementwise as fast
from siftkv.kernels.reference import elementwise as reference
from siftkv.models import ModelConfig
from siftkv.models.rope import RotaryTable


@pytest.fixture(autouse=True, params=[1, 2], ids=["serial", "threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    held = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(held)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def assert_near(found: Tensor, expected: Tensor, steps: int = 1) -> None:
    """Same shape and type, everywhere within so many bf16 numbers, and mostly equal."""
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=steps * 2**-7, atol=1e-30)
    assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (65, 48), (97, 576), (200, 4096), (70, 40)])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 300.0])
def test_norms_agree(rows: int, size: int, scale: float) -> None:
    x, update = normal(rows, size, scale=scale), normal(rows, size, seed=1, scale=scale)
    weight = normal(size, seed=2)
    # The weight's product rounds what was rounded before.
    assert_near(fast.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), steps=2)
    added, normed = fast.add_rms_norm(x, update, weight, 1e-5)
    assert torch.equal(added, x + update)
    assert_near(normed, reference.rms_norm(added, weight, 1e-5), steps=2)


@pytest.mark.parametrize("dim", [16, 24, 32, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("tokens", "heads", "others"), [(1, 1, 0), (67, 3, 1), (130, 12, 3)])
def test_rotation_agrees(dim: int, tokens: int, heads: int, others: int) -> None:
    config = ModelConfig("LlamaForCausalLM", 97, 64, 64, 1, 1, 1, dim, 512)
    cos, sin = RotaryTable(config, 512).gather(torch.arange(tokens) * 3)
    x = normal(tokens, heads + others, dim, seed=dim)[:, :heads]
    found, expected = fast.rotate(x, cos, sin), reference.rotate(x, cos, sin)
    assert found.is_contiguous()
    # Where the two products nearly cancel, what is left of their rounding shows.
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (1, 16), (67, 24), (129, 1536), (65, 97)])
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_swiglu_agrees(rows: int, size: int, scale: float) -> None:
    gate_up = normal(rows, 2 * size, scale=scale)
    found, expected = fast.swiglu(gate_up), reference.swiglu(gate_up)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=1e-20)
    assert ((found != expected) & (expected.abs() > 1e-20)).float().mean() < 0.02


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_faults_stay_visible(value: float) -> None:
    x, weight = normal(70, 64), normal(64, seed=1)
    x[3, 5] = value
    assert not fast.rms_norm(x, weight, 1e-5)[3, 5].isfinite()
    added, normed = fast.add_rms_norm(normal(70, 64, seed=2), x, weight, 1e-5)
    assert not added[3, 5].isfinite()
    assert not normed[3, 5].isfinite()
    assert normed[[*range(3), *range(4, 70)]].isfinite().all()
    if value > 0 or value != value:
        assert not fast.swiglu(x)[3, 5].isfinite()
    factors = torch.ones(70, 1, 64)
    assert not fast.rotate(x[:, None], factors, factors)[3, 0, 5].isfinite()


def test_bodies_are_chosen_by_type_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    swiglu = fast.swiglu
    monkeypatch.setattr(fast, "swiglu", lambda x: used.append(len(x)) or swiglu(x))
    for rows, dtype in ((64, torch.bfloat16), (65, torch.bfloat16), (65, torch.float32), (65, torch.float16)):
        x = normal(rows, 64, seed=rows).to(dtype)
        torch.testing.assert_close(fused.swiglu(x), reference.swiglu(x), rtol=2**-6, atol=1e-20)
    assert used == [65]


def test_merged_operations_equal_their_parts() -> None:
    """What a GPU does in one launch is elsewhere the parts, one after another."""
    config = ModelConfig("LlamaForCausalLM", 97, 64, 64, 1, 1, 1, 32, 512)
    table, norm = RotaryTable(config, 512), normal(64)
    ids, positions = torch.tensor([5, 96, 0]), torch.tensor([0, 511, 30])
    x, normed, cos, sin = fused.enter(ids, positions, normal(97, 64), norm, 1e-5, table.cos, table.sin)
    assert torch.equal(x, normal(97, 64)[ids])
    assert torch.equal(normed, fused.rms_norm(x, norm, 1e-5))
    for found, expected in zip((cos, sin), table.gather(positions), strict=True):
        assert torch.equal(found, expected)
    weight, bias = normal(5 * 32, 64, seed=3), normal(5 * 32, seed=4)
    heads = torch.nn.functional.linear(normed, weight, bias)
    assert torch.equal(fused.linear(normed, weight, bias), heads)
    assert torch.equal(fused.swiglu_linear(normed, weight, bias), fused.swiglu(heads))
    turned = fused.rotated_linear(normed, weight, bias, cos, sin, 3)
    assert torch.equal(turned[:, :3], fused.rotate(heads.view(3, 5, 32)[:, :3], cos, sin))
    assert torch.equal(turned[:, 3:], heads.view(3, 5, 32)[:, 3:])
