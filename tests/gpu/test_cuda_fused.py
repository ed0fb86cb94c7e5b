"""The decoder's fused arithmetic on a GPU against PyTorch: at most one rounding step apart, alone and in a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from siftkv.kernels import fused
from siftkv.kernels.cuda import elementwise as fast
from siftkv.kernels.cuda import linear as few
from siftkv.kernels.cuda import linear_mma
from siftkv.kernels.reference import elementwise as reference
from siftkv.models import ModelConfig
from siftkv.models.rope import RotaryTable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
STEP = {torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""The gap between neighbouring numbers, relative to the smaller one."""


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def assert_near(found: Tensor, expected: Tensor, steps: int, least: float) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=steps * STEP[found.dtype], atol=least)
    assert ((found != expected) & (expected.abs() > least)).float().mean() < 0.02


@DTYPES
@pytest.mark.parametrize(
    ("rows", "size"), [(1, 4096), (3, 8), (64, 576), (17, 5120), (2, 16384), (5, 32768), (9, 52), (2, 40000)]
)
def test_norms_agree(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x, update, weight = normal(rows, size, dtype=dtype), normal(rows, size, dtype=dtype), normal(size, dtype=dtype)
    # The weight's product rounds what was rounded before.
    assert_near(fast.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), 2, 1e-6)
    added, normed = fast.add_rms_norm(x, update, weight, 1e-5)
    assert torch.equal(added, x + update)
    assert_near(normed, reference.rms_norm(added, weight, 1e-5), 2, 1e-6)


@DTYPES
@pytest.mark.parametrize("dim", [16, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("tokens", "heads", "others"), [(1, 40, 8), (67, 3, 1), (129, 1, 0)])
def test_rotation_agrees(dim: int, tokens: int, heads: int, others: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    config = ModelConfig("LlamaForCausalLM", 97, 64, 64, 1, 1, 1, dim, 512)
    cos, sin = RotaryTable(config, 512, "cuda").gather(torch.arange(tokens, device="cuda") * 3)
    x = normal(tokens, heads + others, dim, dtype=dtype)[:, :heads]
    found = fast.rotate(x, cos, sin)
    assert found.is_contiguous()
    assert_near(found, reference.rotate(x, cos, sin), 1, 1e-6)


@DTYPES
@pytest.mark.parametrize(("rows", "size"), [(1, 14336), (64, 1536), (7, 8), (33, 97)])
def test_swiglu_agrees(rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    gate_up = normal(rows, 2 * size, dtype=dtype, scale=4)
    assert_near(fast.swiglu(gate_up), reference.swiglu(gate_up), 2, 1e-6)


@DTYPES
def test_faults_stay_visible(dtype: torch.dtype) -> None:
    x, weight = normal(2, 64, dtype=dtype), normal(64, dtype=dtype)
    x[1, 5] = torch.finfo(dtype).max
    added, normed = fast.add_rms_norm(x, x, weight, 1e-5)
    assert torch.isinf(added[1, 5])
    assert not normed[1, 5].isfinite()
    assert normed[0].isfinite().all()
    assert not fast.swiglu(added)[1, 5].isfinite()


def test_a_graph_replays_them_in_order() -> None:
    """Each kernel may start before the one that it reads from has ended."""
    size, weight = 4096, normal(4096, dtype=torch.bfloat16)
    x, factors = normal(1, size, dtype=torch.bfloat16), torch.rand(1, 1, 64, device="cuda")

    def chain() -> Tensor:
        held, normed = x, x
        for _ in range(20):
            held, normed = fused.add_rms_norm(held, normed, weight, 1e-5)
            normed = fused.rotate(normed.view(1, -1, 64), factors, factors).view(1, -1)
            normed = fused.swiglu(torch.cat([normed, normed], -1))
        return fused.rms_norm(held, weight, 1e-5)

    expected = chain()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


def test_gpu_bodies_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.dtype] = []
    swiglu = fast.swiglu
    monkeypatch.setattr(fast, "swiglu", lambda x: used.append(x.dtype) or swiglu(x))
    for dtype in (torch.bfloat16, torch.float32):
        fused.swiglu(normal(2, 64, dtype=dtype))
    assert used == [torch.bfloat16]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def linear_layers(
    rows: int, inner: int, outer: int, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Tensor]]:
    """Random layers without and with a bias, checked against exact ones: input, weight, bias and result."""
    torch.manual_seed(inner)
    x, weight = normal(rows, inner, dtype=dtype), normal(outer, inner, dtype=dtype, scale=inner**-0.5)
    for bias in (None, normal(outer, dtype=dtype)):
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert few.takes(x, weight)
        found = few.linear(x, weight, bias)
        assert relative(found, exact) < STEP[dtype] / 2
        assert relative(few.swiglu_linear(x, weight, bias), reference.swiglu(exact)) < 2 * STEP[dtype]
        yield x, weight, bias, found


@DTYPES
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("inner", "outer"), [(4096, 512), (14336, 130), (576, 1536), (8, 2), (1000, 98), (1544, 6)])
def test_linear_layers_of_few_rows(rows: int, inner: int, outer: int, dtype: torch.dtype) -> None:
    for x, weight, bias, found in linear_layers(rows, inner, outer, dtype):
        # A request's result does not depend on its batch mates.
        assert torch.equal(found[-1:], few.linear(x[-1:].clone(), weight, bias))


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights are left to the library because they do not matter, not because they cannot be multiplied."""
    monkeypatch.setattr(few, "_LEAST_BYTES", 0)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("rows", [3, 8, 9, 16])
@pytest.mark.parametrize(
    ("inner", "outer", "dtype"),
    [
        (4096, 512, torch.bfloat16),
        (4096, 98, torch.float16),
        (14336, 130, torch.bfloat16),
        (8960, 1536, torch.bfloat16),
        (1536, 34, torch.float16),
        (32, 2, torch.bfloat16),
    ],
)
def test_linear_layers_on_tensor_cores(rows: int, inner: int, outer: int, dtype: torch.dtype) -> None:
    for x, weight, bias, found in linear_layers(rows, inner, outer, dtype):
        # A request's result does not depend on its place among its batch mates.
        assert torch.equal(found.flip(0), few.linear(x.flip(0), weight, bias))


@DTYPES
@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("dim", [16, 24, 64, 80, 128])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_projection_and_rotation_in_one(dim: int, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    config = ModelConfig("LlamaForCausalLM", 97, 64, 64, 1, 1, 1, dim, 512)
    cos, sin = RotaryTable(config, 512, "cuda").gather(torch.arange(rows, device="cuda") * 30)
    x, weight = normal(rows, 512, dtype=dtype), normal(7 * dim, 512, dtype=dtype, scale=512**-0.5)
    for bias in (None, normal(7 * dim, dtype=dtype)):
        heads = few.linear(x, weight, bias).view(rows, 7, dim)
        found = few.rotated_linear(x, weight, bias, cos, sin, 5)
        assert_near(found[:, :5], reference.rotate(heads[:, :5], cos, sin), 1, 1e-6)
        assert torch.equal(found[:, 5:], heads[:, 5:])


@DTYPES
@pytest.mark.parametrize(("tokens", "size"), [(1, 4096), (5, 576), (70, 64)])
def test_entry_of_a_pass(tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    config = ModelConfig("LlamaForCausalLM", 97, 64, 64, 1, 1, 1, 64, 512)
    table = RotaryTable(config, 512, "cuda")
    embedding, weight = normal(97, size, dtype=dtype), normal(size, dtype=dtype)
    ids, positions = (torch.randint(n, (tokens,), device="cuda") for n in (97, 512))
    x, normed, cos, sin = fused.enter(ids, positions, embedding, weight, 1e-5, table.cos, table.sin)
    assert torch.equal(x, embedding[ids])
    assert_near(normed, reference.rms_norm(x, weight, 1e-5), 2, 1e-6)
    for found, expected in zip((cos, sin), table.gather(positions), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("rows", "size", "replays"), [(2, 1024, 30), (8, 2048, 30), (16, 2048, 30)])
def test_early_launches_in_a_graph_keep_their_order(rows: int, size: int, replays: int) -> None:
    """Linear layers read their weights before the launch before them has ended, and its result after."""
    torch.manual_seed(0)
    weights = [normal(2 * size, size, dtype=torch.bfloat16, scale=size**-0.5) for _ in range(12)]
    norm, x = torch.ones(size, dtype=torch.bfloat16, device="cuda"), normal(rows, size, dtype=torch.bfloat16)

    def chain() -> Tensor:
        held = x
        for weight in weights:
            held = fused.rms_norm(held, norm, 1e-5)
            held, _ = fused.add_rms_norm(held, fused.swiglu_linear(held, weight, None), norm, 1e-5)
            held = fused.linear(held, weight[:size], None)
        return held

    expected = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(replays):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("rows", "size", "layout"), [(8, 2048, (8, 2, 2)), (8, 2048, (8, 4, 1)), (16, 1024, (8, 4, 1))]
)
def test_blocks_of_a_cluster_end_when_nothing_reaches_them_any_more(
    rows: int, size: int, layout: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reaches a block that has ended is a launch failure, once in some hundreds of launches."""
    monkeypatch.setitem(linear_mma._LAYOUTS, -(-rows // 8) * 8, (layout,))
    monkeypatch.setattr(few, "_LEAST_BYTES", 0)
    test_early_launches_in_a_graph_keep_their_order(rows, size, 300)
