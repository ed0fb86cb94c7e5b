"""The built-in model through the whole engine: the full cache answers like transformers, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from siftkv import LLM, SamplingParams
from siftkv.models import pull

pytestmark = pytest.mark.model

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at",
    "The three laws of motion state that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 12 + 30?\nA:",
    "In 1905, Albert Einstein",
)
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def folder() -> Path:
    return pull("smollm2-135m", progress=False)


def transformers_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    longest = max(len(ids) for ids in prompts)
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
    generated = model.generate(
        padded,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return generated[:, longest:].tolist()


def test_full_gives_the_tokens_of_transformers(folder: Path) -> None:
    llm = LLM(folder, kv="full", dtype=torch.float32, max_model_len=256, max_num_seqs=len(PROMPTS))
    prompts = [llm.encode(p) for p in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ours = [o.token_ids for o in llm.generate(prompts, params)]
    assert ours == transformers_tokens(folder, prompts)


def test_a_sifted_chat_answers_sensibly(folder: Path) -> None:
    llm = LLM(folder, kv="diffkv", max_model_len=1024, check_integrity=True)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    out = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
    assert "Paris" in out.text
    assert out.finish_reason == "stop"
    assert out.kv is not None
    assert llm.cache.free_pages == llm.cache.spec.num_pages
