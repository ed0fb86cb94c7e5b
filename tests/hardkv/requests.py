"""Requests under Hard-KV in small engines."""

from __future__ import annotations

from typing import Any

import pytest

from siftkv import LLM, RequestOutput, SamplingParams
from siftkv.engine.cascade import Cascade
from siftkv.policies import parse_policy
from tests.tiny import tiny_llm

KV = "hardkv:p=0.4,window=8,sinks=2,lower=16,upper=32,interval=8,queries=4"

FULL = "full:window=8"

KERNELS = pytest.mark.parametrize("kernels", ["reference", "numba"])


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def llm_of(kv: str = KV, **settings: Any) -> LLM:
    """A small pool: checking its integrity in every step takes as long as it has pages."""
    return tiny_llm(kv, **({"kv_cache_memory_bytes": 6 << 20} | settings))


def run(llm: LLM, prompts: list[list[int]], tokens: int, kv: list[str]) -> list[RequestOutput]:
    """All at once, each under its own policy; the cache is empty after it."""
    ids = [
        llm.engine.add(p, greedy(tokens), parse_policy(k), request_id=f"r{i}")
        for i, (p, k) in enumerate(zip(prompts, kv, strict=True))
    ]
    done: dict[str, Any] = {}
    while llm.engine.has_work:
        for chunk in llm.engine.step():
            if chunk.output is not None:
                done[chunk.request_id] = chunk.output
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    return [done[i] for i in ids]


def cascade(llm: LLM, request: str = "r0") -> Cascade:
    [sequence] = llm.engine.sequences(request)
    assert sequence.cascade is not None
    return sequence.cascade


def with_setting(setting: str) -> str:
    """KV with some settings changed."""
    changed = dict(x.split("=") for x in setting.split(","))
    base = dict(x.split("=") for x in KV.partition(":")[2].split(","))
    return "hardkv:" + ",".join(f"{k}={v}" for k, v in (base | changed).items())


def tight(llm: LLM, pages: int) -> int:
    """Bytes of a cache like that of `llm` with so many pages."""
    spec = llm.cache.spec
    a_page = spec.page_bytes + 4
    return llm.cache.usage().allocated + (pages - spec.num_pages) * a_page
