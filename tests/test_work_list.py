"""Attention's work list on the GPU, without one: a model of what `prepare` lays out, `attend` walks over and `merge`
reads, held to what these must agree on for heads of any lengths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache as remembered
from functools import cached_property

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siftkv.cache import CacheSpec, KVCache, build_conditioning
from siftkv.cache.page_size import choose_page_bytes
from siftkv.formats import Tier, TierFormat
from siftkv.kernels import reference
from siftkv.kernels.cuda import device
from siftkv.kernels.cuda.plan import Plan

KIB = 1024
LANES = 32
CACHES = [
    (("k4v4",), 128, 0, 227 * KIB),
    (("k4v4c",), 128, 0, 227 * KIB),
    (("bf16",), 128, 0, 227 * KIB),
    (("bf16",), 64, 8192, 99 * KIB),
    (("k4v2",), 64, 1024, 227 * KIB),
    (("k8v4", "k4v2"), 128, 0, 163 * KIB),
    (("k8v4", "k4v4"), 128, 16384, 227 * KIB),
    (("bf16", "k8v8", "k4v2"), 128, 0, 227 * KIB),
    (("fp16", "k8v2", "k4v8", "k4v1"), 256, 0, 99 * KIB),
]
"""Formats, head_dim, bytes a page (0: chosen), shared memory a block."""


@dataclass(frozen=True)
class WorkList:
    """The line of cost of one call. Names are those of `src/state.cuh`, `prepare.cu`, `attend.cu` and `merge.cu`.

    block_tokens, block_cost: by kind, window first. tokens: `[pairs][kinds]`. teams: of all multiprocessors.
    """

    block_tokens: tuple[int, ...]
    block_cost: tuple[int, ...]
    segment_cost: int
    head_cost: int
    least_share: int
    pair_share: int
    tokens: tuple[tuple[int, ...], ...]
    teams: int

    @property
    def kinds(self) -> int:
        return len(self.block_cost)

    def blocks(self, segment: int) -> int:
        pair, kind = divmod(segment, self.kinds)
        return -(-self.tokens[pair][kind] // self.block_tokens[kind])

    def size(self, segment: int) -> int:
        kind, blocks = segment % self.kinds, self.blocks(segment)
        cost = blocks * self.block_cost[kind] + self.segment_cost if blocks else 0
        return cost + (self.head_cost if kind == self.kinds - 1 else 0)

    @cached_property
    def starts(self) -> list[int]:
        """Of every segment, and the line's end."""
        starts = [0]
        for segment in range(len(self.tokens) * self.kinds):
            starts.append(starts[-1] + self.size(segment))
        return starts

    @property
    def share(self) -> int:
        total = self.starts[-1]
        if total <= self.teams * self.least_share:
            return self.least_share
        return max(-(-total // self.teams), self.pair_share)

    def find(self, low: int) -> int:
        """The segment before that in which a share begins, as 32 lanes look for it."""
        count, at = len(self.starts) - 1, 0
        while count > 1:
            step = -(-count // LANES)
            before = [lane * step < count and self.starts[at + lane * step] <= low for lane in range(LANES)]
            found = sum(before) - 1
            at += found * step
            count = min(step, count - found * step)
        return at - 1

    def walk(self, worker: int) -> list[tuple[int, int]]:
        """Segment and block of all that a team attends to."""
        low = worker * self.share
        high = min(low + self.share, self.starts[-1])
        if low >= high:
            return []
        found = []
        for segment in range(self.find(low) + 1, len(self.starts) - 1):
            start, cost = self.starts[segment], self.block_cost[segment % self.kinds]
            if start >= high:
                break
            first = 0 if start >= low else -(-(low - start) // cost)
            stop = min(self.blocks(segment), -(-(high - start) // cost))
            found += [(segment, block) for block in range(first, stop)]
        return found

    def parts_of(self, pair: int) -> range:
        """The partial results that `merge` reads of a head."""
        segments = range(pair * self.kinds, (pair + 1) * self.kinds)
        last = self.starts[segments[0]]
        for segment in segments:
            if self.blocks(segment):
                last = self.starts[segment] + (self.blocks(segment) - 1) * self.block_cost[segment % self.kinds]
        first = self.starts[segments[0]] // self.share
        return range(pair + first, pair + last // self.share + 1)


@remembered
def sizes_of(
    formats: tuple[str, ...], dim: int, page_bytes: int, shared: int
) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]:
    """Tokens and cost of a block by kind, and the source's constants."""
    tiers = tuple(Tier(TierFormat.parse(name)) for name in formats)
    dtype = torch.float16 if "fp16" in formats else torch.bfloat16
    size = page_bytes or choose_page_bytes(tiers, dim, gpu=True)
    spec = CacheSpec(1, 1, dim, dtype, tiers, 8, 1, 256, max_window=24, page_bytes=size)
    angle = torch.zeros(256, dim // 2)
    c = build_conditioning(1, 1, dim, angle.cos(), angle.sin(), [None], [torch.ones(1, dim)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "pretended", device.GPU((9, 0), shared))
        plan = Plan(KVCache(spec, c, reference).state, 4)
        constants = re.findall(r"constexpr int (\w+) = (-?\d+);", plan.source())
        block_tokens = (plan.window_block, *(tier.layout.tokens for tier in plan.tiers))
        return block_tokens, tuple(plan.costs), {name: int(value) for name, value in constants}


@st.composite
def work_lists(draw: st.DrawFn) -> WorkList:
    """Heads that keep nothing but a window, a few blocks, or very many, on few teams or more than there is work."""
    block_tokens, block_cost, constants = sizes_of(*draw(st.sampled_from(CACHES)))

    def tokens(block: int, least: int) -> st.SearchStrategy[int]:
        few = st.integers(least, 4 * block)
        return few | st.builds(lambda n, off: max(least, n * block + off), st.integers(0, 200), st.integers(-1, 1))

    head = st.tuples(tokens(block_tokens[0], 1), *(tokens(each, 0) for each in block_tokens[1:]))
    return WorkList(
        block_tokens,
        block_cost,
        constants["SEGMENT_COST"],
        constants["HEAD_COST"],
        constants["LEAST_SHARE"],
        constants["PAIR_SHARE"],
        tuple(draw(st.lists(head, min_size=1, max_size=70))),
        draw(st.integers(1, 40) | st.sampled_from([12 * 132, 16 * 132, 7 * 108])),
    )


@settings(max_examples=400, deadline=None)
@given(work_lists())
def test_what_is_merged_has_been_written_and_every_block_is_attended_to_once(work: WorkList) -> None:
    written: dict[int, int] = {}
    visited = []
    for worker in range(min(work.teams, work.starts[-1] // work.share + 2)):
        blocks = work.walk(worker)
        visited += blocks
        for pair in {segment // work.kinds for segment, _ in blocks}:
            assert pair + worker not in written, "two results in one place"
            written[pair + worker] = pair
    assert visited == [(s, block) for s in range(len(work.starts) - 1) for block in range(work.blocks(s))]
    assert max(written) < len(work.tokens) + work.teams, "the work space holds a result a head and a team"
    for pair in range(len(work.tokens)):
        assert [written.get(part) for part in work.parts_of(pair)] == [pair] * len(work.parts_of(pair))
    assert len(written) == sum(len(work.parts_of(pair)) for pair in range(len(work.tokens)))


@pytest.mark.parametrize("cache", CACHES, ids=lambda x: "+".join(x[0]))
def test_no_share_is_shorter_than_what_lies_between_two_blocks_of_a_head(
    cache: tuple[tuple[str, ...], int, int, int],
) -> None:
    _, costs, constants = sizes_of(*cache)
    assert constants["LEAST_SHARE"] >= max(costs) + constants["SEGMENT_COST"]
