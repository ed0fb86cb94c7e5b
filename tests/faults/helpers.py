"""Requests, faults that are raised once, and what must hold when all have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from siftkv import LLM
from siftkv.engine.sequence import Sequence
from siftkv.policies import parse_policy
from tests.hardkv.requests import greedy, tight
from tests.tiny import prompt, tiny_llm

BAD = "bad"


def is_nothing(found: object) -> bool:
    return isinstance(found, Tensor) and not found.numel()


def first_time(real: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """`real`, whose first call raises, its work done."""
    errors = [error]

    def called(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if errors and not is_nothing(found):
            raise errors.pop()
        return found

    return called


def add(llm: LLM, name: str, length: int, kv: str, tokens: int = 40) -> Sequence:
    llm.engine.add(prompt(length, length), greedy(tokens), parse_policy(kv), request_id=name)
    return llm.engine.sequences(name)[0]


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
    llm.cache.check_integrity()
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    assert llm.cache.free_slots == llm.cache.spec.max_slots


def four(llm: LLM) -> list[Sequence]:
    return [add(llm, str(n), 30 + n, "full:window=8", 120) for n in range(4)]


def in_a_tight_pool() -> tuple[LLM, list[Sequence]]:
    """An engine that has to swap to run `four`, and what they are where there is room."""
    roomy = tiny_llm("full:window=8", max_window=8)
    expected = four(roomy)
    finish(roomy)
    return tiny_llm("full:window=8", max_window=8, kv_cache_memory_bytes=tight(roomy, 40)), expected
