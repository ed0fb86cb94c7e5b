"""What the server knows of its engine: numbers for the dashboard and for metrics, and the routes that serve them.

`collect` and `inspect_request` read the engine: they run on its thread, between two steps.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from torch import Tensor

from siftkv.cache import KVCache
from siftkv.cache.accounting import slot_bytes
from siftkv.engine.llm import LLM
from siftkv.engine.outputs import DROPPED
from siftkv.engine.sequence import Sequence
from siftkv.errors import IntegrityError, RequestError
from siftkv.kernels.reference.pages import pages_needed
from siftkv.policies import Policy
from siftkv.server.fate_map import fate_map, legend
from siftkv.server.metrics import ServerMetrics

WINDOW = "window"
ENDED = "ended"
"""State that `/api/requests/{id}` tells of a request that is not known, or not any more."""

STREAM_PATH = "/api/stream"

STREAM_SECONDS = 1.0
"""Seconds between two events of `/api/stream`."""

INTEGRITY_SECONDS = 5.0
"""Least time between two complete checks of the cache's bookkeeping; page counts are compared every time."""

INTEGRITY_SHARE = 0.005
"""Most of the engine's time that complete checks may take."""


class Worker(Protocol):
    """The part of `siftkv.server.worker.EngineWorker` that the routes here use."""

    metrics: ServerMetrics

    @property
    def state(self) -> str:
        """`starting`, `ready`, `draining`, `stopped` or `failed`."""

    def snapshot(self) -> dict[str, Any]:
        """The latest result of `collect`; empty before the first one."""

    async def inspect(self, request_id: str) -> dict[str, Any]:
        """`inspect_request` on the engine's thread."""


def collect(llm: LLM) -> dict[str, Any]:
    """The engine and its cache at this moment, made of JSON types only.

    Counts of running, waiting and swapped completions; `requests`, one entry each; `pages` (total, free, by_tier);
    `usage` (bytes of the whole cache) and `memory` (the same bytes by what holds them); for the running batch
    `physical_bytes`, `bytes_per_live_token`, `ratio` (to bf16), `kept_share` `[L][H]`, `kept_tokens` `[L][H]` (mean
    over requests) and `tokens_by_tier` (names, and entries `[L][tier]`); `policies` (completions by `kv` setting);
    `free_list` and `integrity`.
    """
    scheduler, cache = llm.engine.scheduler, llm.cache
    running, waiting, swapped = list(scheduler.running), list(scheduler.waiting), list(scheduler.swapped)
    by_tier = _pages_by_tier(cache)
    live = [*running, *swapped, *waiting]
    return {
        "time": time.time(),
        "model": llm.model.name,
        "kv": short_name(llm.kv),
        "running": len(running),
        "waiting": len(waiting),
        "swapped": len(swapped),
        "swapped_bytes": scheduler.swapped_bytes,
        "max_num_seqs": cache.spec.max_slots,
        "pages": {"total": cache.spec.num_pages, "free": cache.free_pages, "by_tier": by_tier},
        "usage": asdict(cache.usage()),
        "memory": _memory(cache, by_tier, len(running)),
        "policies": dict(Counter(short_name(s.policy.policy) for s in live)),
        "free_list": _free_list(cache),
        "integrity": _integrity(cache, by_tier),
        "requests": _requests(cache, running) + [_request(s) for s in [*swapped, *waiting]],
    } | _batch(cache, running)


def inspect_request(llm: LLM, request_id: str) -> dict[str, Any]:
    """One request: what `collect` says of it, `kept_share` `[L][H]`, `tokens_by_tier`, and `fates` `[L][H]`: strings of
    one character a token, which `legend` explains. A request that holds no slot has none of the last four.

    Raises RequestError for an id that is not known.
    """
    try:
        sequences = llm.engine.sequences(request_id)
    except KeyError:
        raise RequestError(f"no request {request_id!r} is running: it may have finished") from None
    sequence = next((s for s in sequences if s.slot >= 0), sequences[0])
    if sequence.slot < 0:
        return _request(sequence)
    [entry] = _requests(llm.cache, [sequence])
    batch = _batch(llm.cache, [sequence])
    parts = {name: batch[name] for name in ("kept_share", "tokens_by_tier", "physical_bytes", "bytes_per_live_token")}
    return entry | parts | {"legend": legend(llm.cache), "fates": fate_map(llm.cache, sequence.slot)}


def short_name(policy: Policy) -> str:
    """The shortest `kv` string of a policy: settings at their defaults are left out."""
    usual = {f.name: f.default for f in fields(policy)}  # type: ignore[arg-type]
    settings = [(n, v) for n, v in vars(policy).items() if n in usual and not _same(v, usual[n])]
    told = ",".join(
        f"{name}={value if isinstance(value, (int, float, str)) else 'per-head'}" for name, value in settings
    )
    return f"{policy.name}:{told}" if told else policy.name


def _same(value: object, usual: object) -> bool:
    return type(value) is type(usual) and bool(value == usual)


def _slots(cache: KVCache, sequences: list[Sequence]) -> Tensor:
    return torch.tensor([s.slot for s in sequences], dtype=torch.int64, device=cache.state.pages.device)


def _request(sequence: Sequence) -> dict[str, Any]:
    return {
        "id": sequence.request_id,
        "index": sequence.index,
        "kv": short_name(sequence.policy.policy),
        "prompt_tokens": len(sequence.prompt_ids),
        "output_tokens": len(sequence.output_ids),
        "max_tokens": sequence.max_tokens,
        "age_s": round(time.perf_counter() - sequence.arrival, 3),
        "state": sequence.status.value,
        "preemptions": sequence.preemptions,
    }


def _requests(cache: KVCache, running: list[Sequence]) -> list[dict[str, Any]]:
    if not running:
        return []
    slots = _slots(cache, running)
    held, seen = cache.request_bytes(slots).tolist(), cache.state.seen[slots].tolist()
    sizes = [{"physical_bytes": b, "ratio": b / max(1, cache.spec.bf16_bytes(n))} for b, n in zip(held, seen)]
    return [_request(sequence) | size for sequence, size in zip(running, sizes, strict=True)]


def _batch(cache: KVCache, running: list[Sequence]) -> dict[str, Any]:
    """Figures of a batch: bytes and ratio, kept share and tokens a head, entries by tier a layer."""
    state, spec = cache.state, cache.spec
    slots = _slots(cache, running)
    seen, lengths = state.seen[slots], state.lengths[slots].long()  # [B], [B, L, H, T]
    lengths = lengths * (seen > 0)[:, None, None, None]  # of a prompt on its way no token counts as seen
    near = torch.minimum(seen, state.sinks[slots]) + (seen - state.window_start[slots]).clamp_min(0)
    heads = near[:, None, None, None].expand(*lengths.shape[:3], 1)
    dropped = seen[:, None, None, None] - heads - lengths.sum(-1, keepdim=True)
    entries = torch.cat([lengths, heads, dropped], -1).sum(0).cpu()  # [L, H, T + 2]
    kept = entries[..., :-1].sum(-1)
    total, live = int(seen.sum()), int(kept.sum())
    held = int(cache.request_bytes(slots).sum()) if running else 0
    return {
        "tokens_seen": total,
        "physical_bytes": held,
        "bf16_bytes": spec.bf16_bytes(total),
        "bytes_per_live_token": held / live if live else 0.0,
        "ratio": held / spec.bf16_bytes(total) if total else 0.0,
        "kept_share": [[round(x, 4) for x in layer] for layer in (kept / max(1, total)).tolist()],
        "kept_tokens": [[round(x, 2) for x in layer] for layer in (kept / max(1, len(running))).tolist()],
        "tokens_by_tier": {
            "names": [*(tier.name for tier in spec.tiers), WINDOW, DROPPED],
            "layers": entries.sum(1).tolist(),
        },
    }


def _pages_by_tier(cache: KVCache) -> dict[str, int]:
    held = pages_needed(cache.state, cache.state.lengths).sum((0, 1, 2)).tolist()
    return {tier.name: pages for tier, pages in zip(cache.spec.tiers, held, strict=True)}


def _memory(cache: KVCache, by_tier: dict[str, int], running: int) -> dict[str, int]:
    """Bytes of the whole cache by what holds them; they add up to `usage.allocated`."""
    usage, size = cache.usage(), cache.spec.page_bytes
    slots = running * slot_bytes(cache.state)
    parts = {name: pages * size for name, pages in by_tier.items()}
    return parts | {
        "free pages": usage.pool - sum(parts.values()),
        "windows and tables": slots,
        "unused slots": usage.slots - slots,
        "shared": usage.shared,
    }


def _free_list(cache: KVCache) -> dict[str, int]:
    taken, returned = (int(x) for x in cache.state.counters.tolist())
    return {"taken": taken, "returned": returned, "level": returned - taken}


@dataclass
class _Check:
    """When a cache was last checked completely, when it is due again, and the first fault that was found in it."""

    at: float = 0.0
    due: float = 0.0
    fault: str | None = None


_checks: WeakKeyDictionary[KVCache, _Check] = WeakKeyDictionary()


def _integrity(cache: KVCache, by_tier: dict[str, int]) -> dict[str, Any]:
    """Whether the bookkeeping is whole. A fault stays: what was wrong once is not right later."""
    check = _checks.setdefault(cache, _Check())
    now = time.monotonic()
    if check.fault is None:
        lost = cache.spec.num_pages - cache.free_pages - sum(by_tier.values())
        if lost:
            check.fault = f"{abs(lost)} pages are {'neither free nor' if lost > 0 else 'both free and'} counted as held"
        elif now >= check.due:
            try:
                cache.check_integrity()
            except IntegrityError as error:
                check.fault = str(error)
            check.at, took = now, time.monotonic() - now
            check.due = now + max(INTEGRITY_SECONDS, took / INTEGRITY_SHARE)
    return {"ok": check.fault is None, "message": check.fault, "checked_s_ago": round(now - check.at, 3)}


def router(worker: Worker) -> APIRouter:
    """`GET /api/snapshot`, `/api/requests/{id}`, and `/api/stream`: a snapshot a second as server-sent events."""
    api = APIRouter(prefix="/api", tags=["dashboard"])

    def current() -> dict[str, Any]:
        found = worker.snapshot()
        return found | {"state": worker.state, "counters": worker.metrics.counters(), "now": time.time()}

    @api.get("/snapshot")
    async def snapshot() -> dict[str, Any]:
        return current()

    @api.get("/requests/{request_id}")
    async def inspect(request_id: str) -> dict[str, Any]:
        try:
            return await worker.inspect(request_id)
        except RequestError:  # it ended between a look at the list and this one, which is no fault
            return {"id": request_id, "state": ENDED}

    @api.get(STREAM_PATH.removeprefix("/api"))
    async def stream(request: Request) -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            while worker.state != "stopped" and not await request.is_disconnected():
                yield f"data: {json.dumps(current())}\n\n"
                await asyncio.sleep(STREAM_SECONDS)

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    return api
