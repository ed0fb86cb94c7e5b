"""Engines with just enough cache for what a benchmark runs, so that nothing waits for pages."""

from __future__ import annotations

from siftkv.engine.llm import LLM
from siftkv.engine.sizing import DEFAULT_MEMORY
from siftkv.models import LoadedModel
from siftkv.policies import Policy

_ROOM = 2
"""Times the bytes of the tokens alone: part pages of each head, windows and tables come on top."""


def open_for(
    model: LoadedModel,
    policy: Policy,
    tokens: int,
    requests: int,
    formats: tuple[str, ...] = (),
    kernels: str = "auto",
    memory_bytes: int | None = None,
    max_window: int | None = None,
) -> LLM:
    """An LLM for `requests` requests of at most `tokens` tokens at a time, whatever their policy keeps.

    memory_bytes: less, where some may wait. formats, kernels, max_window: as in `LLM`. Raises what `LLM` raises.
    """
    config = model.config
    per_token = config.num_layers * config.num_kv_heads * config.head_dim * 2 * model.decoder.dtype.itemsize
    needed = _ROOM * requests * tokens * per_token
    return LLM(
        model,
        policy,
        formats=formats,
        max_model_len=tokens,
        max_num_seqs=requests,
        kv_cache_memory_bytes=max(needed, DEFAULT_MEMORY) if memory_bytes is None else memory_bytes,
        kernels=kernels,
        max_window=max_window,
    )
