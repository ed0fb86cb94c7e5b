"""The KV cache: pages, tables, windows and lengths of many requests, and the operations an engine needs. It knows no
policy and no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.cache.accounting import CacheUsage, request_bytes, usage
from siftkv.cache.integrity import check_integrity
from siftkv.cache.spec import CacheSpec
from siftkv.cache.swap import SwappedRequest, swap_in, swap_out
from siftkv.errors import NumericsError, OutOfPages, RequestError
from siftkv.kernels import Kernels
from siftkv.kernels.reference.pages import pages_needed
from siftkv.kernels.state import CacheState, Conditioning


@dataclass(frozen=True)
class SlotRule:
    """How a request's tokens live in the cache: `siftkv.policies.base.DecodeRule` spread over the pool's tiers.

    alpha fp32, cap int64 `[L, H, T]` over the pool's tiers (cap 0 where the request does not use a tier).
    """

    window: int
    sinks: int
    alpha: Tensor
    cap: Tensor
    refresh: int = 0
    catch_up: int = 0


class KVCache:
    """A sifted KV cache for up to `spec.max_slots` requests.

    A request's life: `admit`, then for each layer of its prompt `store_prompt`, then `begin_decode`; for each new token
    `attend` in every layer and one `step`;
    at the end `release`. `state` is open to kernels and tests; nobody else writes to it.
    """

    def __init__(self, spec: CacheSpec, conditioning: Conditioning, kernels: Kernels) -> None:
        self.spec = spec
        self.kernels = kernels
        self.state = _empty_state(spec, conditioning)
        self._free_slots = list(range(spec.max_slots))

    def admit(self, rule: SlotRule) -> int:
        """Take a slot for a request that lives by `rule`. Raises RequestError when the rule does not fit the cache,
        OutOfPages when no slot is free.
        """
        if rule.window > self.spec.max_window:
            raise RequestError(
                f"window={rule.window} is above this cache's {self.spec.max_window}: open it with a larger max_window"
            )
        if rule.sinks > self.spec.sink_rows:
            raise RequestError(
                f"sinks={rule.sinks} is above this cache's {self.spec.sink_rows}: open it with more sink_rows"
            )
        if not self._free_slots:
            raise OutOfPages(f"all {self.spec.max_slots} request slots are taken")
        slot = self._free_slots.pop(0)
        state = self.state
        state.window[slot], state.sinks[slot] = rule.window, rule.sinks
        state.refresh[slot], state.catch_up[slot] = rule.refresh, rule.catch_up
        state.alpha[slot], state.cap[slot] = rule.alpha.to(state.alpha), rule.cap.to(state.cap)
        return slot

    def protected(self, slot: int, length: int) -> Tensor:
        """Which tokens (bool `[length]`) of a prompt stay in the window: the sinks and the most recent ones."""
        position = torch.arange(length, device=self.state.pages.device)
        return (position < self.state.sinks[slot]) | (position >= length - self.state.window[slot])

    def store_prompt(self, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, tier: Tensor) -> None:
        """Keep one layer of a request's prompt: k, v `[n, H, D]` (plain keys after RoPE), score fp32 `[H, n]`.

        tier: int8 `[H, n]`, tier of the pool or -1 = dropped; what it says of protected tokens is ignored. Raises
            OutOfPages before anything is taken
        when the pool cannot hold the layer, NumericsError when a key or value is NaN or infinite.
        """
        if not (_all_finite(k) and _all_finite(v)):
            raise NumericsError(f"NaN or infinity in the keys or values of layer {layer} of the prompt")
        protected = self.protected(slot, len(k))
        position = torch.arange(len(k), device=k.device)
        free = ~protected
        kept = [(tier[:, free] == index).sum(-1) for index in range(len(self.spec.tiers))]
        needed = int(pages_needed(self.state, torch.stack(kept, -1)).sum())
        if needed > self.free_pages:
            raise OutOfPages(
                f"layer {layer} of a prompt of {len(k)} tokens needs {needed} pages and {self.free_pages} are free"
            )
        near = protected.nonzero()[:, 0]
        self.kernels.write_window(self.state, layer, slot, k[near], v[near], score[:, near], position[near])
        self.kernels.append_tokens(
            self.state, layer, slot, k[free], v[free], score[:, free], position[free], tier[:, free]
        )

    def begin_decode(self, slot: int, length: int) -> None:
        """The prompt of `length` tokens is stored in every layer; the next token stands at position `length`."""
        self.state.seen[slot] = length
        self.state.window_start[slot] = torch.maximum(self.state.sinks[slot], length - self.state.window[slot])

    def attend(self, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store one new token a request and attend to all that its heads keep: slots int64 `[B]`, q `[B, Hq, D]`, k, v
        `[B, H, D]`; `[B, Hq, D]`.
        """
        return self.kernels.decode_attention(self.state, layer, slots, q, k, v)

    def step(self, slots: Tensor, advance: bool = True) -> Tensor:
        """End a decode step: sift what leaves the windows. Bool `[B]`, false for requests whose token had to wait for a
        page.
        """
        return self.kernels.sift_step(self.state, slots, advance)

    def finite(self, slots: Tensor) -> Tensor:
        """Bool `[B]`: whether the newest token's keys and values of each request are finite in every layer. Call it
        before `step`.
        """
        state, position = self.state, self.state.seen[slots]
        row = torch.where(position < state.sinks[slots], position, state.sink_rows + position % state.ring_rows)
        newest = torch.stack([state.window_k[slots, :, :, row], state.window_v[slots, :, :, row]])
        return torch.isfinite(newest).flatten(2).all(-1).all(0)

    def release(self, slots: list[int]) -> None:
        """Give back every page of the requests, and their slots."""
        if slots:
            self.kernels.release(self.state, torch.tensor(slots, device=self.state.pages.device))
            self._free_slots.extend(slots)

    def swap_out(self, slot: int) -> SwappedRequest:
        """Copy a request to host memory and release it here."""
        swapped = swap_out(self.state, slot)
        self.release([slot])
        return swapped

    def swap_in(self, swapped: SwappedRequest) -> int:
        """Bring a request back, as it was, and return its new slot. Raises OutOfPages, and takes nothing, when slots or
        pages are short.
        """
        if swapped.num_pages > self.free_pages:
            raise OutOfPages(f"the request needs {swapped.num_pages} pages and {self.free_pages} are free")
        if not self._free_slots:
            raise OutOfPages(f"all {self.spec.max_slots} request slots are taken")
        slot = self._free_slots.pop(0)
        swap_in(self.state, slot, swapped)
        return slot

    @property
    def free_pages(self) -> int:
        return self.state.free_pages()

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def step_page_bound(self, slots: Tensor) -> int:
        """Pages that the next step of these requests can take at most: one a tier that stands at the end of its last
        page, at most one (two with catch-up) a head slot.
        """
        state = self.state
        tokens = torch.tensor([layout.tokens for layout in state.layouts], device=slots.device)
        full = (state.lengths[slots] % tokens == 0) & (state.cap[slots] > 0)
        most = (1 + state.catch_up[slots]).clamp(max=2)[:, None, None]
        return int(torch.minimum(full.sum(-1), most).sum())

    def pages_held(self, slots: Tensor) -> Tensor:
        """Pages of each request, int64 `[B]`."""
        return pages_needed(self.state, self.state.lengths[slots]).flatten(1).sum(1)

    def request_bytes(self, slots: Tensor) -> Tensor:
        """Physical bytes of each request, int64 `[B]`: its pages and its share of every table and side buffer."""
        return request_bytes(self.state, self.pages_held(slots))

    def usage(self) -> CacheUsage:
        """Physical bytes of the whole cache."""
        return usage(self.state)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every page is owned once or free once and every length agrees with its pages."""
        check_integrity(self.state)


def _all_finite(x: Tensor) -> bool:
    """NaN and infinity both show in the extremes, which are much cheaper than a test of every element."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())


def _empty_state(spec: CacheSpec, conditioning: Conditioning) -> CacheState:
    device = conditioning.cos.device
    slots, layers, heads, tiers = spec.all_slots, spec.num_layers, spec.num_kv_heads, len(spec.tiers)
    rows = spec.sink_rows + spec.ring_rows

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return CacheState(
        layouts=spec.layouts,
        sink_rows=spec.sink_rows,
        pages=zeros(spec.num_pages, spec.page_bytes, dtype=torch.uint8),
        free_ring=torch.arange(spec.num_pages, dtype=torch.int32, device=device),
        counters=torch.tensor([0, spec.num_pages], device=device),
        page_table=torch.full(
            (slots, layers, heads, -(-tiers // 2), spec.table_width), -1, dtype=torch.int32, device=device
        ),
        lengths=zeros(slots, layers, heads, tiers, dtype=torch.int32),
        window_k=zeros(slots, layers, heads, rows, spec.head_dim, dtype=spec.dtype),
        window_v=zeros(slots, layers, heads, rows, spec.head_dim, dtype=spec.dtype),
        window_score=zeros(slots, layers, heads, rows, dtype=torch.float32),
        seen=zeros(slots, dtype=torch.int64),
        window_start=zeros(slots, dtype=torch.int64),
        sinks=zeros(slots, dtype=torch.int64),
        window=zeros(slots, dtype=torch.int64),
        refresh=zeros(slots, dtype=torch.int64),
        catch_up=zeros(slots, dtype=torch.int64),
        alpha=zeros(slots, layers, heads, tiers, dtype=torch.float32),
        cap=zeros(slots, layers, heads, tiers, dtype=torch.int32),
        conditioning=conditioning,
    )
