"""Tiny models of every family, and the dense attention that says what a decoder should answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 61
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def _llama(rope: dict[str, object] | None = None, **changes: object) -> LlamaConfig:
    parameters = {"rope_type": "default", "rope_theta": 500.0} | (rope or {})
    return LlamaConfig(**(_SHAPE | {"rope_parameters": parameters} | changes))


FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": _llama(),
    "llama-tied": _llama(tie_word_embeddings=True),
    "llama-biases": _llama(attention_bias=True, mlp_bias=True),
    "llama-wide-heads": _llama(head_dim=24),
    "llama-one-kv-head": _llama(num_key_value_heads=1),
    "llama-linear": _llama({"rope_type": "linear", "factor": 4.0}),
    "llama-dynamic": _llama({"rope_type": "dynamic", "factor": 4.0}),
    "llama3": _llama({"rope_type": "llama3", "factor": 8.0, **_LLAMA3}),
    "llama-yarn": _llama({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    "mistral": MistralConfig(**_SHAPE, head_dim=16, sliding_window=None),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2-yarn": Qwen2Config(
        **_SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 24,
        },
    ),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=16),
    "qwen3-tied": Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
}


def save_random(config: PreTrainedConfig, folder: Path, seed: int = 0, **save_options: object) -> torch.nn.Module:
    """A random `transformers` model in float32, saved to `folder` with a tokenizer; norms and biases are random too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.normal_()
            else:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    model.save_pretrained(folder, **save_options)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCAB))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


class DenseAttention:
    """Exact causal attention of several requests over everything they have seen: the meaning of `Attend`.

    `lengths` says how many tokens of the coming flat batch each request has, in order; set it before each forward.
    """

    def __init__(self, requests: int) -> None:
        self.lengths: Sequence[int] = ()
        self._caches: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(requests)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = list(self.lengths)
        parts = zip(self._caches, q.split(sizes), k.split(sizes), v.split(sizes))
        return torch.cat([self._one(cache, layer, *tensors) for cache, *tensors in parts])

    def _one(self, cache: dict[int, tuple[Tensor, Tensor]], layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in cache:
            k, v = torch.cat((cache[layer][0], k)), torch.cat((cache[layer][1], v))
        cache[layer] = k, v
        new, old = q.shape[0], k.shape[0] - q.shape[0]
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5  # [Hq, new, old + new]
        future = torch.ones(new, old + new, dtype=torch.bool).triu(old + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)
