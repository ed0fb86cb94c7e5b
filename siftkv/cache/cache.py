"""The KV cache: pages, tables, windows and lengths of many requests, and the operations an engine needs. It knows no
policy and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from siftkv.cache import compaction
from siftkv.cache.accounting import CacheUsage, request_bytes, usage
from siftkv.cache.allocation import empty_state
from siftkv.cache.compaction import HeadTokens, RingPlaces
from siftkv.cache.integrity import check_integrity
from siftkv.cache.recovery import discard, reclaim
from siftkv.cache.rules import SlotRule
from siftkv.cache.spec import CacheSpec
from siftkv.cache.swap import SwappedRequest, swap_bytes, swap_in, swap_out
from siftkv.errors import NumericsError, OutOfPages, SiftKVError
from siftkv.kernels import Kernels
from siftkv.kernels.reference.pages import most_taken, pages_needed
from siftkv.kernels.state import Conditioning


class KVCache:
    """A sifted KV cache for up to `spec.max_slots` requests.

    A request's life: `admit`, then for each layer of its prompt `store_prompt`, then `finish_prompt`; for each new
    token `attend` in every layer and one `step`; at the end `release`. `state` is open to kernels and tests;
    nobody else writes to it.
    """

    def __init__(self, spec: CacheSpec, conditioning: Conditioning, kernels: Kernels) -> None:
        self.spec = spec
        self.kernels = kernels
        self.state = empty_state(spec, conditioning)
        self._free_slots = list(range(spec.max_slots))
        self._protection: dict[int, tuple[int, int]] = {}
        self._examined: set[int] = set()
        self.under_way: dict[int, Callable[[], object]] = {}
        """By slot: orders the current stream behind work elsewhere that still writes to the request's pages. Called,
        and forgotten, before they are copied or given back.
        """

    def admit(self, rule: SlotRule) -> int:
        """Take a slot for a request that lives by `rule`. Raises RequestError when the rule does not fit the cache,
        OutOfPages when no slot is free.
        """
        rule.check(self.spec)
        with self._fresh_slot() as slot:
            rule.write(self.state, slot)
            self.state.not_finite[slot] = False
            self.state.peak_pages[slot] = 0
        self._protection[slot] = (rule.window, rule.sinks)
        self._examined |= {slot} if rule.catch_up else set()
        return slot

    @contextmanager
    def _fresh_slot(self) -> Iterator[int]:
        """A slot that is free again after an error."""
        if not self._free_slots:
            raise OutOfPages(f"all {self.spec.max_slots} request slots are taken")
        slot = self._free_slots.pop(0)
        try:
            yield slot
        except BaseException:
            discard(self, [slot])
            raise

    def set_shares(self, layer: int, slots: Tensor, share: Tensor) -> None:
        """New shares of one layer, learned from prompts: slots int64 `[R]`, share fp32 `[R, H, T]` over the pool's
        tiers. A tier holds at most `ceil(share * N)` tokens a head after `N` tokens, rounded up to whole pages, and no
        more than its cap; infinity leaves only the cap. The host waits for nothing.
        """
        self.state.cap_share[slots, layer] = share.to(self.state.cap_share)

    def protected(self, slot: int, length: int) -> Tensor:
        """Which tokens (bool `[length]`) of a prompt stay in the window: the sinks and the most recent ones."""
        middle = slice(*self.middle(slot, length))
        out = torch.ones(length, dtype=torch.bool, device=self.state.pages.device)
        out[middle] = False
        return out

    def middle(self, slot: int, length: int) -> tuple[int, int]:
        """The tokens `[first, end)` of a prompt that leave the window."""
        window, sinks = self._protection[slot]
        first = min(sinks, length)
        return first, max(first, length - window)

    def store_prompt(
        self, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, tier: Tensor, finite: bool = False
    ) -> None:
        """Keep one layer of a request's prompt: k, v `[n, H, D]` (plain keys after RoPE), score fp32 `[H, n]`.

        tier: int8 `[H, n]`, tier of the pool or -1 = dropped; what it says of protected tokens is ignored. Raises
        OutOfPages, before anything is taken, when the pool cannot hold the layer, and NumericsError when a key or value
        is NaN or infinite; with kernels that defer faults `finish_prompt` tells instead.
        finite: the caller knows that no key or value is NaN or infinite.
        """
        middle = slice(*self.middle(slot, len(k)))
        if self.kernels.DEFERS_FAULTS:
            total = k.sum(dtype=torch.float32) + v.sum(dtype=torch.float32)
            self.state.not_finite[slot] |= ~torch.isfinite(total)
        else:
            if not (finite or (_all_finite(k) and _all_finite(v))):
                raise NumericsError(f"NaN or infinity in the keys or values of layer {layer} of the prompt")
            self._check_room(layer, len(k), tier[:, middle])
        position = torch.arange(len(k), device=k.device)
        for part in (slice(0, middle.start), slice(middle.stop, len(k))):
            self.kernels.write_window(self.state, layer, slot, k[part], v[part], score[:, part], position[part])
        self.kernels.append_tokens(
            self.state, layer, slot, k[middle], v[middle], score[:, middle], position[middle], tier[:, middle]
        )

    def _check_room(self, layer: int, tokens: int, tier: Tensor) -> None:
        kept = torch.stack([(tier == index).sum(-1) for index in range(len(self.spec.tiers))], -1)
        needed = int(pages_needed(self.state, kept).sum())
        if needed > self.free_pages:
            raise OutOfPages(
                f"layer {layer} of a prompt of {tokens} tokens needs {needed} pages and {self.free_pages} are free"
            )

    def finish_prompt(self, slot: int, length: int) -> SiftKVError | None:
        """`finish_prompts` of one."""
        return self.finish_prompts([slot], [length])[0]

    def finish_prompts(self, slots: list[int], lengths: list[int]) -> list[SiftKVError | None]:
        """Prompts went through every layer; the next token of each stands at position `lengths[i]`.

        Returns what kernels that defer faults could not keep: OutOfPages or NumericsError; then release the slot.
        """
        state = self.state
        index, seen = state.seen.new_tensor(slots), state.seen.new_tensor(lengths)
        starts = [max(self._protection[s][1], n - self._protection[s][0]) for s, n in zip(slots, lengths, strict=True)]
        state.peak_pages[index] = self.pages_held(index)
        state.seen[index] = seen
        state.window_start[index] = state.seen.new_tensor(starts)
        if not self.kernels.DEFERS_FAULTS:
            return [None] * len(slots)
        faults = torch.stack([state.not_finite[index].int(), self.kernels.refused_layers(state)[index].int()])
        return [
            self._fault(n, bool(wrong), refused) for n, wrong, refused in zip(lengths, *faults.tolist(), strict=True)
        ]

    def _fault(self, length: int, not_finite: bool, refused: int) -> SiftKVError | None:
        if not_finite:
            return NumericsError("NaN or infinity in the keys or values of the prompt")
        if refused:
            return OutOfPages(
                f"pages ran out in {refused} of {self.spec.num_layers} layers of a prompt of {length} tokens"
            )
        return None

    def attend(self, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store one new token a request and attend to all that its heads keep: slots int64 `[B]`, q `[B, Hq, D]`, k, v
        `[B, H, D]`; `[B, Hq, D]`.
        """
        return self.kernels.decode_attention(self.state, layer, slots, q, k, v)

    def step(self, slots: Tensor) -> Tensor:
        """End a decode step: sift what leaves the windows. Bool `[B]`, false for requests whose token had to wait for a
        page.
        """
        return self.kernels.sift_step(self.state, slots, self.examines)

    @property
    def examines(self) -> bool:
        """Whether any resident request has its stale tokens examined (`SlotRule.catch_up`)."""
        return bool(self._examined)

    def finite(self, slots: Tensor) -> Tensor:
        """Bool `[B]`: whether all keys and values of each request were finite, up to the last `step`."""
        return ~self.state.not_finite[slots]

    def ring_places(self, prompts: Sequence[tuple[int, int, int]]) -> RingPlaces:
        """Where the last queries of prompts go that lie in a flat batch: (slot, first row, length) each."""
        return compaction.ring_places(self.state, prompts)

    def store_queries(self, layer: int, places: RingPlaces, q: Tensor) -> None:
        """Keep the last queries of one layer of prompts: q `[T, Hq, D]` after RoPE, the flat batch of `places`."""
        compaction.store_queries(self.state, layer, places, q)

    def queries(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """The last queries of one layer of a request: fp32 `[W', Hq, D]` and their positions int64 `[W']`, ascending;
        W' is the length of the ring or, if that is less, what the request has seen.
        """
        return compaction.recent_queries(self.state, layer, slot)

    def tokens(self, layer: int, slot: int, values: bool = False) -> HeadTokens:
        """All that one layer of a request keeps, in time order. Raises FormatError when a tier in which it has tokens
        stores no positions.
        """
        return compaction.head_tokens(self.state, layer, slot, values)

    def write_votes(
        self, layer: int, slot: int, tokens: HeadTokens, votes: Tensor | None, score: Tensor | None = None
    ) -> None:
        """New votes (integer `[H, n]`) and scores (fp32 `[H, n]`) of tokens in tiers, None = as they are; a tier keeps
        those that it has room for.
        """
        compaction.write_votes(self.state, layer, slot, tokens, votes, score)

    def skip_pages(self, layer: int, slot: int, tokens: HeadTokens, selected: Tensor) -> None:
        """Let attention ignore the full pages without a token of `selected` (bool `[H, n]`), and read all others.

        Raises SiftKVError unless the cache was opened with `skips`.
        """
        compaction.skip_pages(self.state, layer, slot, tokens, selected)

    def rewrite(
        self,
        layer: int,
        slot: int,
        tokens: HeadTokens,
        keep: Tensor,
        target: int,
        merged: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Leave only the tokens of `keep` (bool `[H, n]`), contiguous in the tier `target`; see
        `siftkv.cache.compaction.rewrite`. Raises OutOfPages before anything is changed.
        """
        compaction.rewrite(self.state, layer, slot, tokens, keep, target, merged)

    def release(self, slots: list[int]) -> None:
        """Give back every page of the requests, and their slots, whatever an error does in the middle."""
        if slots:
            try:
                self._join(slots)
                index = torch.tensor(slots, device=self.state.pages.device)
                self.kernels.release(self.state, index)
                if self.state.skips:
                    self.state.page_skip[index] = 0
            except Exception as error:
                reclaim(self, slots, error)
            self._free_slots.extend(slot for slot in slots if slot not in self._free_slots)
            self._examined.difference_update(slots)

    def _join(self, slots: list[int]) -> None:
        for slot in slots:
            join = self.under_way.pop(slot, None)
            if join is not None:
                join()

    def swap_bytes(self, slot: int) -> int:
        """Host bytes that `swap_out` would take."""
        return swap_bytes(self.state, slot)

    def swap_out(self, slot: int) -> SwappedRequest:
        """Copy a request to host memory and release it here."""
        self._join([slot])
        swapped = swap_out(self.state, slot)
        self.release([slot])
        return swapped

    def swap_in(self, swapped: SwappedRequest) -> int:
        """Bring a request back, as it was, and return its new slot. Raises OutOfPages when slots or pages are short.
        Nothing is taken then, nor by an error of the device.
        """
        if swapped.num_pages > self.free_pages:
            raise OutOfPages(f"the request needs {swapped.num_pages} pages and {self.free_pages} are free")
        with self._fresh_slot() as slot:
            swap_in(self.state, slot, swapped)
            protection = int(self.state.window[slot]), int(self.state.sinks[slot])
            examined = bool(self.state.catch_up[slot])
        self._protection[slot] = protection
        self._examined |= {slot} if examined else set()
        return slot

    @property
    def free_pages(self) -> int:
        return self.state.free_pages()

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def step_page_bound(self, slots: Tensor) -> int:
        """Pages that the next step of these requests can take at most (`siftkv.kernels.reference.pages.most_taken`)."""
        return int(most_taken(self.state, slots, 1))

    def pages_held(self, slots: Tensor) -> Tensor:
        """Pages of each request, int64 `[B]`."""
        return pages_needed(self.state, self.state.lengths[slots]).flatten(1).sum(1)

    def request_bytes(self, slots: Tensor) -> Tensor:
        """Physical bytes of each request, int64 `[B]`: its pages and its share of every table and side buffer."""
        return request_bytes(self.state, self.pages_held(slots))

    def peak_bytes(self, slots: Tensor) -> Tensor:
        """The most physical bytes that each request held at the end of any step, int64 `[B]`."""
        return request_bytes(self.state, self.state.peak_pages[slots])

    def usage(self) -> CacheUsage:
        """Physical bytes of the whole cache."""
        return usage(self.state)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every page is owned once or free once and every length agrees with its pages."""
        check_integrity(self.state)


def _all_finite(x: Tensor) -> bool:
    """NaN and infinity both show in the extremes, which are much cheaper than a test of every element."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())
