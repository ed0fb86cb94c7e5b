"""A model in a folder, and a text that it can read."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.models_helpers import FAMILIES, save_random


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random `transformers` model, saved, whose words are w3 to w60."""
    path = tmp_path_factory.mktemp("tiny")
    config = copy.deepcopy(FAMILIES["llama"])
    config.max_position_embeddings = 256
    save_random(config, path)
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    drawn = torch.randint(3, 61, (600,), generator=torch.Generator().manual_seed(5)).tolist()
    path.write_text(" ".join(f"w{i}" for i in drawn))
    return path
