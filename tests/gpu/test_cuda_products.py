"""Products by chosen algorithms against PyTorch's, alone and in a graph; choices are made once and kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv import LLM, SamplingParams
from siftkv.errors import SiftKVError
from siftkv.kernels.cuda import cublas, measure, products
from tests.tiny import prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OUTPUTS, INPUTS, ROWS = 4096, 1024, (24, 64)


@pytest.fixture(autouse=True)
def own_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SIFTKV_CACHE", str(tmp_path))
    monkeypatch.delenv("SIFTKV_PRODUCTS", raising=False)
    monkeypatch.setattr(measure, "_GAIN", 100.0)  # any algorithm wins
    kept = dict(products._choices)
    products._choices.clear()
    yield
    products._choices.clear()
    products._choices.update(kept)


def layers(bias: bool, dtype: torch.dtype = torch.bfloat16) -> list[tuple[Tensor, Tensor | None]]:
    torch.manual_seed(0)
    made = []
    for _ in range(3):
        weight = (torch.randn(OUTPUTS, INPUTS, device="cuda") / INPUTS**0.5).to(dtype)
        made.append((weight, torch.randn(OUTPUTS, device="cuda").to(dtype) if bias else None))
    return made


def prepare(of: list[tuple[Tensor, Tensor | None]], rows: tuple[int, ...] = ROWS) -> float:
    head = torch.zeros(8, INPUTS, device="cuda", dtype=of[0][0].dtype)  # too small to be measured
    return products.prepare([of], (head, None), rows, torch.cuda.Stream())


def chosen(of: list[tuple[Tensor, Tensor | None]], rows: int) -> str | None:
    found = products._choices[products._Kind.of(*of[0])].find(rows)
    return None if found is None else found.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("bias", [False, True])
def test_chosen_products_agree_alone_and_in_a_graph(bias: bool, dtype: torch.dtype) -> None:
    own = layers(bias, dtype)
    assert 0 < prepare(own) < 20
    for rows in (*ROWS, 1024, 3000):
        x = torch.randn(rows, INPUTS, device="cuda").to(dtype)
        expected = [F.linear(x, *each) for each in own]
        found = [products.linear(x, *each) for each in own]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [products.linear(x, *each) for each in own]
        graph.replay()
        for one, other, replayed in zip(expected, found, captured, strict=True):
            assert torch.equal(other, replayed)
            assert (one.float() - other.float()).abs().max() <= 2**-6 * one.float().abs().max()
            if rows >= 1024:
                assert torch.equal(one, other), "prompts keep PyTorch's bits"
    assert chosen(own, ROWS[0]) is not None
    assert chosen(own, 9) is None


def test_choices_are_kept_from_start_to_start() -> None:
    own = layers(False)
    assert prepare(own) > 0
    first = [chosen(own, rows) for rows in (*ROWS, 8192)]
    products._choices.clear()
    assert prepare(own) == 0
    assert [chosen(own, rows) for rows in (*ROWS, 8192)] == first


def test_steps_of_few_rows_are_left_to_kernels_of_our_own() -> None:
    own = layers(False)
    assert prepare(own, (2, 8, 24)) > 0
    assert [rows in products._choices[products._Kind.of(*own[0])].exact for rows in (2, 8, 24)] == [False, False, True]


def test_nothing_is_chosen_where_it_is_not_wanted_or_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = layers(False)
    monkeypatch.setenv("SIFTKV_PRODUCTS", "library")
    assert prepare(own) == 0
    assert not products._choices
    monkeypatch.delenv("SIFTKV_PRODUCTS")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIFTKV_CACHE", str(tmp_path / "file"))
    prepare(own, ROWS[:1])
    assert not products._choices
    x = torch.randn(ROWS[0], INPUTS, device="cuda").to(torch.bfloat16)
    assert torch.equal(products.linear(x, *own[0]), F.linear(x, *own[0]))


def test_a_missing_library_leaves_products_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise SiftKVError("cuBLASLt is not to be had")

    monkeypatch.setattr(cublas, "version", missing)
    assert prepare(layers(False)) == 0
    assert not products._choices


def test_an_engine_counts_the_work_space_and_answers_alike_from_start_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_LEAST_BYTES", 0)
    model = tiny_model(dtype=torch.bfloat16, head_dim=64, hidden_size=512, intermediate_size=1024, num_layers=4)
    model.decoder.cuda()
    prompts = [prompt(n, seed=n) for n in (200, 60, 90, 120)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    answers = []
    for _ in range(2):
        products._choices.clear()
        llm = LLM(model, "diffkv:window=8", max_num_seqs=4, kv_cache_memory_bytes=64 << 20)
        answers.append([out.token_ids for out in llm.generate(prompts, params)])
        assert llm.cache.usage().workspace >= cublas.WORKSPACE_BYTES
    assert answers[0] == answers[1]
