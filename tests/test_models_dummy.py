"""Models of a shape, with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from siftkv import LLM, SamplingParams
from siftkv.errors import ModelError
from siftkv.models import dummy_model, load_model
from tests.models_helpers import FAMILIES, VOCAB, save_random


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config without weights or tokenizer."""
    save_random(FAMILIES["llama"], tmp_path / "whole")
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    return tmp_path / "shape"


def test_a_shape_runs(folder: Path) -> None:
    model = dummy_model(folder, "float32")
    assert model.name == "shape"
    assert model.config == load_model(folder.parent / "whole").config
    llm = LLM(model, "full", max_num_seqs=2, max_model_len=32, kernels="reference")
    by_ids, by_text = llm.generate([[3, 17, 5], "3 17 5"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert by_ids.token_ids == by_text.token_ids
    assert by_ids.text.split() == [str(token) for token in by_ids.token_ids]


def test_the_seed_decides(folder: Path) -> None:
    first, again, other = (dummy_model(folder, "float32", seed=seed).decoder for seed in (0, 0, 1))
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters()):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name


def test_dtypes(folder: Path) -> None:
    assert dummy_model(folder, torch.bfloat16).decoder.dtype is torch.bfloat16
    content = json.loads((folder / "config.json").read_text()) | {"dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(content))
    assert dummy_model(folder).decoder.dtype is torch.float16
    with pytest.raises(ModelError, match="int8"):
        dummy_model(folder, "int8")


def test_a_tokenizer_of_the_folder_is_taken(folder: Path) -> None:
    model = dummy_model(folder.parent / "whole")
    assert model.tokenizer.get_vocab() == load_model(folder.parent / "whole").tokenizer.get_vocab()


def test_words_that_are_no_numbers(folder: Path) -> None:
    tokenizer = dummy_model(folder).tokenizer
    assert tokenizer(f"7 seven {VOCAB - 1} {VOCAB}")["input_ids"] == [7, 0, VOCAB - 1, 0]


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        dummy_model(tmp_path)
