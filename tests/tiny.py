"""Tiny models and caches for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from siftkv import LLM
from siftkv.cache import CacheSpec, KVCache, build_conditioning, merge_tiers
from siftkv.engine.binding import BoundPolicy
from siftkv.formats import Tier, TierFormat
from siftkv.kernels import get_kernels
from siftkv.models import LoadedModel, ModelConfig, random_model
from siftkv.policies import DecodeRule, Policy, PromptView, parse_policy
from siftkv.policies.importance import sampled_rows

VOCAB = 97


def tiny_config(**changes: object) -> ModelConfig:
    settings: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 512,
        "eos_token_ids": (0,),
    }
    return ModelConfig(**(settings | changes))  # type: ignore[arg-type]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t0", unk_token="t1")


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> LoadedModel:
    config = tiny_config(**changes)
    return LoadedModel(config, random_model(config, seed, dtype), tiny_tokenizer(), "tiny")


def tiny_llm(kv: str | Policy = "diffkv:window=8,sinks=2", **settings: object) -> LLM:
    model = settings.pop("model", None) or tiny_model()
    defaults: dict[str, object] = {"max_num_seqs": 4, "kernels": "reference", "check_integrity": True}
    defaults["admission"] = "greedy"  # tests of tight pools want preemption
    return LLM(model, kv, **(defaults | settings))  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class ThreeTiers(Policy):
    """Thirds of the prompt in three formats, caps of 10, 12 and 14 tokens while decoding."""

    name: ClassVar[str] = "three"
    window: int = 4
    sinks: int = 0

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return tuple(Tier(TierFormat.parse(x)) for x in ("k8v4", "k4v4", "k4v2"))

    def rows(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sampled_rows(length, 1)

    def classify(self, prompt: PromptView) -> torch.Tensor:
        third = (torch.arange(prompt.length) * 3 // (prompt.length - self.window)).clamp(max=2)
        return third.to(torch.int8).expand(prompt.score.shape)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        cap = torch.tensor([10, 12, 14]).expand(num_layers, num_kv_heads, 3)
        return DecodeRule(torch.zeros(cap.shape), cap, refresh=1)


def small_cache(
    kv: list[str] | list[Policy],
    *,
    layers: int = 2,
    heads: int = 2,
    head_dim: int = 16,
    num_pages: int = 400,
    max_slots: int = 4,
    max_len: int = 256,
    max_window: int = 8,
    sink_rows: int = 4,
    dtype: torch.dtype = torch.float32,
    kernels: str = "reference",
    bias: float = 0.0,
    conditioning: str = "full",
    page_bytes: int = 0,
    query_rows: int = 0,
    skips: bool = False,
) -> tuple[KVCache, list[BoundPolicy]]:
    """A cache without a model, opened for the given policies, and the policies bound to it."""
    policies = [parse_policy(x) for x in kv]
    dense = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    tiers = merge_tiers([t for p in policies for t in p.tiers(dense)], positions=bias > 0)
    angle = torch.arange(max_len)[:, None] * (10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2)))[None]
    generator = torch.Generator().manual_seed(1)
    biases = [torch.randn(heads, head_dim, generator=generator) * bias if bias else None for _ in range(layers)]
    c = build_conditioning(
        layers, heads, head_dim, angle.cos(), angle.sin(), biases, [torch.ones(heads, head_dim)] * layers, conditioning
    )
    spec = CacheSpec(
        layers,
        heads,
        head_dim,
        dtype,
        tiers,
        num_pages,
        max_slots,
        max_len,
        max_window,
        sink_rows,
        page_bytes,
        query_rows=max(query_rows, *(p.query_rows for p in policies)),
        num_heads=2 * heads,
        skips=skips or any(p.skips for p in policies),
    )
    return KVCache(spec, c, get_kernels(kernels)), [BoundPolicy(p, spec) for p in policies]


def classified(cache: KVCache, policy: BoundPolicy, layer: int, slot: int, *held: torch.Tensor) -> torch.Tensor:
    """Pool tier int8 `[H, n]` of a prompt: `held` is its score `[H, n]`, q `[n, Hq, D]`, k and v `[n, H, D]`."""
    protected = cache.protected(slot, held[0].shape[1])
    return policy.classify(PromptView(layer, held[0][None], protected, *(x[None] for x in held[1:])))[0]


def random_prompt(
    cache: KVCache, policy: BoundPolicy, slot: int, length: int, generator: torch.Generator
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Store a random prompt; returns plain keys and values `[n, H, D]` a layer."""
    spec, stored = cache.spec, []
    for layer in range(spec.num_layers):
        k, v = (
            torch.randn(length, spec.num_kv_heads, spec.head_dim, generator=generator).to(spec.dtype) for _ in range(2)
        )
        q = torch.randn(length, 2 * spec.num_kv_heads, spec.head_dim, generator=generator).to(spec.dtype)
        rows = policy.rows(length)
        score = torch.zeros(spec.num_kv_heads, length) if rows is None else cache.kernels.prompt_importance(q, k, *rows)
        cache.store_prompt(layer, slot, k, v, score, classified(cache, policy, layer, slot, score, q, k, v))
        cache.store_queries(layer, cache.ring_places([(slot, 0, length)]), q)
        stored.append((k, v))
    assert cache.finish_prompt(slot, length) is None
    return stored


def random_step(
    cache: KVCache, slots: list[int], generator: torch.Generator, group: int = 2, step: bool = True
) -> list[tuple[torch.Tensor, ...]]:
    """Attend to one random token a request in every layer, then (unless `step` is off) step.

    Returns (q, k, v, out) a layer.
    """
    spec, out = cache.spec, []
    index = torch.tensor(slots)
    for layer in range(spec.num_layers):
        k, v = (
            torch.randn(len(slots), spec.num_kv_heads, spec.head_dim, generator=generator).to(spec.dtype)
            for _ in range(2)
        )
        q = torch.randn(len(slots), group * spec.num_kv_heads, spec.head_dim, generator=generator).to(spec.dtype)
        out.append((q, k, v, cache.attend(layer, index, q, k, v)))
    if step:
        cache.step(index)
    return out
