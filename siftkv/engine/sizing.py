"""How many pages a memory budget holds, planned before anything is allocated. Planned bytes equal allocated bytes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from siftkv.cache import CacheSpec, dense_name, merge_tiers
from siftkv.cache.page_size import choose_page_bytes
from siftkv.errors import RequestError, SiftKVError
from siftkv.formats import Tier, TierFormat
from siftkv.kernels.state import Conditioning
from siftkv.models import ModelConfig
from siftkv.policies import Policy

DEFAULT_MEMORY = 1 << 30
MIN_WINDOW = 64
MIN_SINKS = 4

_log = logging.getLogger("siftkv.engine")
_MUCH = 0.5
"""Of a budget: where more is taken by slots, requests end up waiting for pages beside empty slots."""


@dataclass(frozen=True)
class PoolRequest:
    """What a user asks of a cache; None where it is to be chosen.

    positions: whether quantised tiers store positions in any case. gpu: page sizes for a GPU, and a slot for the empty
        rows of a captured batch.
    """

    policy: Policy
    formats: tuple[str, ...]
    max_model_len: int | None
    max_num_seqs: int
    memory_bytes: int | None
    max_window: int | None
    sink_rows: int | None
    positions: bool
    gpu: bool = False


def plan_spec(config: ModelConfig, dtype: torch.dtype, asked: PoolRequest, conditioning: Conditioning) -> CacheSpec:
    """The cache that fits `asked`. Raises RequestError for a context the model does not have, PolicyError for a policy
    that makes no sense for it, SiftKVError for a budget that holds nothing.
    """
    dense = dense_name(dtype)
    extra = [_declared(TierFormat.parse(dense if name == "bf16" else name)) for name in asked.formats]
    own = asked.policy.tiers(dense)
    if any(not tier.format.dense for tier in extra):  # requests under other policies will come, and may read scores
        own = (*own, *(_declared(tier.format) for tier in own))
    tiers = merge_tiers([*own, *extra], asked.positions)
    spec = CacheSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        tiers=tiers,
        num_pages=1,
        max_slots=_positive(asked.max_num_seqs, "max_num_seqs"),
        max_len=_context(config, asked.max_model_len),
        max_window=_window(asked),
        page_bytes=choose_page_bytes(tiers, config.head_dim, asked.gpu),
        padding_slots=int(asked.gpu),
        query_rows=asked.policy.query_rows,
        num_heads=config.num_heads,
        skips=asked.policy.skips,
        sink_rows=max(MIN_SINKS, asked.policy.sinks) if asked.sink_rows is None else asked.sink_rows,
    )
    asked.policy.check_context(spec.max_len)
    fixed = planned_bytes(replace(spec, num_pages=0), conditioning)
    budget = asked.memory_bytes
    if budget is None:
        budget = fixed + max(DEFAULT_MEMORY, _longest_request_bytes(spec))
    a_page = spec.page_bytes + 4
    pages = (budget - fixed) // a_page
    if pages < spec.head_slots:
        raise SiftKVError(
            f"kv_cache_memory_bytes={budget} is too small: windows and tables of {spec.max_slots} requests "
            f"take {fixed} bytes and one page a head takes "
            f"{spec.head_slots * a_page} more; raise it, or lower max_num_seqs or max_model_len"
        )
    if asked.memory_bytes is not None and fixed > _MUCH * budget:
        _log.warning(
            "windows and tables of %d requests take %.0f %% of the KV cache's memory before any token is kept: lower "
            "max_num_seqs, or raise kv_cache_memory_bytes",
            spec.max_slots,
            100 * fixed / budget,
        )
    return replace(spec, num_pages=int(pages))


def _window(asked: PoolRequest) -> int:
    """Rows of the ring: as asked, else room for other policies' usual windows, unless the policy counts every byte."""
    if asked.max_window is not None:
        return asked.max_window
    return asked.policy.window if asked.policy.exact_window else max(MIN_WINDOW, asked.policy.window)


def planned_bytes(spec: CacheSpec, conditioning: Conditioning) -> int:
    """Bytes that a cache of this spec will allocate: `KVCache.usage().allocated`, told beforehand."""
    shared = 2 * 8 + sum(
        t.numel() * t.element_size() for t in vars(conditioning).values() if isinstance(t, torch.Tensor)
    )
    return spec.all_slots * spec.slot_bytes + spec.num_pages * (spec.page_bytes + 4) + shared


def _declared(fmt: TierFormat) -> Tier:
    """A format opened for requests that are not known yet: a dense one for `full`, which reads no scores; others with
    all state.
    """
    return Tier(fmt, scores=not fmt.dense, positions=not fmt.dense)


def _longest_request_bytes(spec: CacheSpec) -> int:
    """Pages of one request of the longest context in the most precise tier."""
    return spec.head_slots * -(-spec.max_len // spec.layouts[0].tokens) * (spec.page_bytes + 4)


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise SiftKVError(f"{name}={value}: use 1 or more")
    return value


def _context(config: ModelConfig, asked: int | None) -> int:
    if asked is None:
        return config.context_limit
    if asked < 2:
        raise RequestError(f"max_model_len={asked}: use 2 or more")
    if asked > config.context_limit:
        why = "its sliding window" if config.sliding_window == config.context_limit else "its positions"
        raise RequestError(
            f"max_model_len={asked} is beyond this model's {config.context_limit} tokens ({why}): lower it"
        )
    return asked
