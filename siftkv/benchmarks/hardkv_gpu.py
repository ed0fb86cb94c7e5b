"""What Hard-KV's triggers take on a GPU, and what heads of their own lengths give.

A Llama-3-8B shape with random weights. Random weights attend almost uniformly, so heads do not come to differ by
themselves, and votes let nearly everything stay: requests are put into the cache as they would stand there, with a
given number of tokens in every head, and what a trigger is to keep is given by a budget or a mask. Beside that
everything runs as in the engine: graphs, triggers of staggered requests, selections on their own stream.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from siftkv.benchmarks.hardkv_trigger import CONTEXT, METRICS, TriggerRow, trigger_cost
from siftkv.benchmarks.standing import stand
from siftkv.engine.cascade import cascade_of, run_due
from siftkv.engine.graphs import DecodeGraphs, Landing
from siftkv.engine.llm import LLM
from siftkv.errors import SiftKVError
from siftkv.models import LoadedModel
from siftkv.policies import Policy, parse_policy

KEPT, BATCH, RATIO = 2048, 64, 0.25
POOL_BYTES = 12 << 30
"""Of the whole KV cache, tables and windows included, that throughput is compared at."""

STEPS, BASELINE_STEPS, WARM_UP = 160, 24, 4
ON_TEXT, EVENLY, EVENLY_IN_LOG = "as in SmolLM2 on text", "drawn 1:8 evenly", "drawn 1:8 evenly in log"
SPREADS = (ON_TEXT, EVENLY, EVENLY_IN_LOG)
_QUANTILES = (0.04, 0.06, 0.1, 0.17, 0.18, 0.2, 0.3, 0.35, 0.39, 0.45, 0.49, 0.57, 0.64, 0.71, 0.73, 0.81, 0.84, 0.9,
              0.94, 0.98, 1.1, 1.15, 1.2, 1.28, 1.38, 1.42, 1.54, 1.65, 1.77, 1.9, 2.17, 3.03, 4.36)  # fmt: skip
"""Tokens that heads keep by their mean, from the least to the most: 90 heads of SmolLM2-135M after 7,936 tokens, 23 %
in all (`siftkv inspect --kv hardkv:p=0.93,lower=1024,upper=2048 --data a_scandal_in_bohemia --prompt-tokens 7936`).
"""
_ROOM_BYTES = 21 << 30


@dataclass(frozen=True)
class DecodeRow:
    """Decode steps of `requests` requests. ms: median, p99 and mean. ratio: physical bytes by bf16's, mean over
    requests, at the end.
    """

    what: str
    requests: int
    median_ms: float
    p99_ms: float
    mean_ms: float
    ratio: float

    @property
    def tokens_per_second(self) -> float:
        return self.requests / self.mean_ms * 1e3


@dataclass(frozen=True)
class HardKVFigures:
    """All of it. loaded: with triggers, `idle`: the same requests without. own, fixed, padded: at `POOL_BYTES`; padded
    by how heads differ.
    """

    triggers: list[TriggerRow]
    loaded: DecodeRow
    idle: DecodeRow
    own: dict[str, DecodeRow]
    padded: dict[str, DecodeRow]
    fixed: DecodeRow

    @property
    def share(self) -> float:
        """Of decode time that triggers take."""
        return 1.0 - self.idle.mean_ms / self.loaded.mean_ms

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Standing:
    """Requests that stand in a cache, decoded as the engine does: a step is launched while the one before it runs.

    lengths: int64 `[B, L, H, T]`. Seeds of triggers differ by request.
    """

    def __init__(self, llm: LLM, policy: Policy, lengths: Tensor, seen: list[int]) -> None:
        self.llm = llm
        graphs = llm.engine.runner.graphs
        if graphs is None:
            raise SiftKVError("this benchmark measures CUDA graphs: it needs a GPU of compute capability 8.0 or later")
        self.graphs: DecodeGraphs = graphs
        self.seen = list(seen)
        self.slots = stand(llm, policy, lengths, torch.tensor(seen, device=lengths.device))
        self.cascades = cascades(llm, policy, len(seen))
        self._slots = torch.tensor(self.slots, device=lengths.device)
        self._tokens = torch.randint(1, llm.model.config.vocab_size, (len(seen),), device=lengths.device)

    @torch.inference_mode()
    def steps(self, count: int, triggers: bool) -> list[float]:
        """Milliseconds on the device from the end of one step to that of the next, `count` times."""
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + WARM_UP)]
        before: Landing | None = None
        for end in ends:
            if triggers:
                run_due(self.llm.cache, zip(self.cascades, self.slots, self.seen, strict=True))
            landing = self.graphs.launch(self._tokens, self._slots)
            end.record()
            self.seen = [n + 1 for n in self.seen]
            if before is not None:
                before.wait()
            before = landing
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(ends[WARM_UP - 1 : -1], ends[WARM_UP:], strict=True)]

    def row(self, what: str, times: list[float]) -> DecodeRow:
        cache = self.llm.cache
        held = float(cache.request_bytes(self._slots).float().mean())
        ordered = sorted(times)
        p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
        ratio = held / cache.spec.bf16_bytes(int(fmean(self.seen)))
        return DecodeRow(what, len(self.slots), median(times), p99, fmean(times), ratio)

    def release(self) -> None:
        self.llm.cache.release(self.slots)


def cascades(llm: LLM, policy: Policy, count: int) -> list[Any]:
    """Triggers of requests whose prompts are long over."""
    bound = llm.engine.bind(policy)
    return [cascade_of(bound, llm.cache.spec, [i + 1, 7 * i + 3]) for i in range(count)]


def trigger_share(llm: LLM, policy: Policy) -> tuple[DecodeRow, DecodeRow]:
    """`BATCH` requests whose heads hold `KEPT` tokens after a trigger and what has come since: with triggers and, of
    the steps before and after that, without.
    """
    spec, near = llm.cache.spec, policy.window + policy.sinks
    since = llm.cache.state.seen.new_tensor(
        [next(k for k in range(1, CONTEXT) if c.due(CONTEXT - k)) for c in cascades(llm, policy, BATCH)]
    )
    shape = (BATCH, spec.num_layers, spec.num_kv_heads, 1)
    lengths = (KEPT - near + since)[:, None, None, None].expand(shape).contiguous()
    held = Standing(llm, policy, lengths, [CONTEXT] * BATCH)
    idle = held.steps(BASELINE_STEPS, triggers=False)
    loaded = held.steps(STEPS, triggers=True)
    idle += held.steps(BASELINE_STEPS, triggers=False)
    rows = (held.row("with triggers", loaded), held.row("without triggers", idle))
    held.release()
    return rows


def head_lengths(llm: LLM, how: str, requests: int) -> Tensor:
    """Tokens a head, int64 `[requests, L, H, 1]`, so that a request takes `RATIO` of bf16's bytes. how: one of
    `SPREADS`; 1:8 is from 2/9 to 16/9 of the mean where lengths are even.
    """
    spec = llm.cache.spec
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(requests, spec.num_layers, spec.num_kv_heads, 1, generator=generator)
    if how == ON_TEXT:
        known = torch.tensor(_QUANTILES)
        place = draw * (len(known) - 1)
        factor = torch.lerp(known[place.floor().long()], known[place.ceil().long()], place.frac())
    else:
        factor = 1 + 7 * draw if how == EVENLY else 8**draw
    mean = (RATIO * spec.bf16_bytes(CONTEXT) - spec.slot_bytes) / spec.head_slots / spec.layouts[0].bytes_per_token
    lengths = (factor / factor.mean() * mean).long().clamp_max(CONTEXT)
    return lengths.to(llm.cache.state.seen.device)


def that_fit(llm: LLM, lengths: Tensor) -> int:
    """Requests of `lengths` int64 `[B, L, H, T]` that a cache of `POOL_BYTES` holds, with room to decode `STEPS`."""
    spec = llm.cache.spec
    sizes = torch.tensor([layout.tokens for layout in spec.layouts], device=lengths.device)
    grows = torch.tensor([STEPS * layout.format.dense for layout in spec.layouts], device=lengths.device)
    pages = -(-(lengths + grows) // sizes)
    each = pages.flatten(1).sum(1) * (spec.page_bytes + 4) + spec.slot_bytes
    shared = llm.cache.usage().shared - 4 * spec.num_pages
    return int((each.cumsum(0) <= POOL_BYTES - spec.slot_bytes - shared).sum())


def own_and_padded(llm: LLM, how: str) -> tuple[DecodeRow, DecodeRow]:
    """Heads of their own lengths under triggers, and all heads padded to their request's longest: static top-k, whose
    selection is left out in its favour.
    """
    drawn = head_lengths(llm, how, BATCH)
    lengths = drawn[: that_fit(llm, drawn)]
    policy = parse_policy("hardkv")
    held = Standing(llm, policy, lengths, [CONTEXT] * len(lengths))
    own = held.row(f"hardkv, heads {how}", held.steps(STEPS - 2 * WARM_UP, triggers=True))
    held.release()
    longest = drawn.amax((1, 2), keepdim=True).expand(drawn.shape)
    longest = longest[: that_fit(llm, longest)].contiguous()
    held = Standing(llm, policy, longest, [CONTEXT] * len(longest))
    padded = held.row(f"top-k padded, heads {how}", held.steps(BASELINE_STEPS, triggers=False))
    held.release()
    return own, padded


def fixed_at_ratio(model: LoadedModel) -> DecodeRow:
    """DiffKV's tiers at `RATIO` of bf16's bytes: 60 % of tokens in k4v2, so many in k4v4 that the ratio is met."""
    kv = "fixed:high_share={:.4f},low_share=0.6,length=" + str(CONTEXT)
    llm = open_llm(model, kv.format(0.3))
    try:
        spec = llm.cache.spec
        high, low = (layout.bytes_per_token for layout in spec.layouts)
        a_head = (RATIO * spec.bf16_bytes(CONTEXT) - spec.slot_bytes) / spec.head_slots
        share = (a_head - 0.6 * CONTEXT * low) / high / CONTEXT
        policy = parse_policy(kv.format(share))
        counts = llm.cache.state.seen.new_tensor([round(share * CONTEXT), round(0.6 * CONTEXT)])
        lengths = counts.expand(BATCH, spec.num_layers, spec.num_kv_heads, 2).contiguous()
        lengths = lengths[: that_fit(llm, lengths)]
        # Scores are refreshed at every eighth position: not of all requests in the same step.
        held = Standing(llm, policy, lengths, [CONTEXT + i % 8 for i in range(len(lengths))])
        row = held.row(f"fixed, {share:.0%} k4v4, 60% k4v2", held.steps(STEPS - 2 * WARM_UP, triggers=False))
        held.release()
        return row
    finally:
        del llm
        _collect()


def open_llm(model: LoadedModel, kv: str) -> LLM:
    """With more room than `POOL_BYTES`: what fits those is counted."""
    return LLM(model, kv, max_num_seqs=BATCH, max_model_len=CONTEXT + 512, kv_cache_memory_bytes=_ROOM_BYTES)


def _collect() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def run_hardkv(model: LoadedModel) -> HardKVFigures:
    """All figures. Raises SiftKVError where there is no CUDA device."""
    kv = f"hardkv:budget={KEPT}"
    llm, policy = open_llm(model, kv), parse_policy(kv)
    try:
        triggers = [trigger_cost(llm, policy, metric) for metric in METRICS]
        loaded, idle = trigger_share(llm, policy)
        pairs = {how: own_and_padded(llm, how) for how in SPREADS}
    finally:
        del llm
        _collect()
    own, padded = ({how: pair[i] for how, pair in pairs.items()} for i in range(2))
    return HardKVFigures(triggers, loaded, idle, own, padded, fixed_at_ratio(model))
