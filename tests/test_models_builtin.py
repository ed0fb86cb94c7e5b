"""The real built-in model, fetched once into the user's cache."""

from __future__ import annotations

import pytest
import torch

from siftkv.models import LoadedModel, load_model, pull
from tests.models_helpers import DenseAttention

pytestmark = pytest.mark.model

TEXT = "The capital of France is Paris, and the capital of Italy is"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("smollm2-135m", torch.float32)


@torch.inference_mode()
def test_logits_equal_transformers(model: LoadedModel) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(model.tokenizer(TEXT).input_ids)
    attend = DenseAttention(1)
    attend.lengths = [len(ids)]
    logits = model.decoder.logits(model.decoder(ids, torch.arange(len(ids)), attend))
    reference = AutoModelForCausalLM.from_pretrained(pull("smollm2-135m"), dtype=torch.float32).eval()
    torch.testing.assert_close(logits, reference(ids[None]).logits[0], rtol=1e-4, atol=2e-4)
    assert model.tokenizer.decode(logits[-1].argmax()) == " Rome"


def test_shape_and_dtype(model: LoadedModel) -> None:
    config = model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.context_limit, config.rope.theta, config.tie_embeddings) == (8192, 100000.0, True)
    assert load_model("smollm2-135m").decoder.dtype is torch.bfloat16


def test_tokenizer_speaks_chat_and_ends_with_im_end(model: LoadedModel) -> None:
    tokenizer = model.tokenizer
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(chat, add_special_tokens=False).input_ids
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(ids) == chat


@pytest.mark.parametrize(
    "text", [TEXT, "def f(x):\n    return x ** 2  # naïve\n", "  two  spaces, 1234567 and 漢字 🙂"]
)
def test_tokenizer_loses_nothing(model: LoadedModel, text: str) -> None:
    ids = model.tokenizer(text).input_ids
    assert model.tokenizer.decode(ids) == text
    assert max(ids) < model.config.vocab_size
