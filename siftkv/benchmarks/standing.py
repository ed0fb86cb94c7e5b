"""Requests put into a cache's tensors as if they had been prefilled and sifted: any number of tokens in any head."""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.benchmarks.kernels import fill_metadata
from siftkv.engine.llm import LLM
from siftkv.formats import PageLayout
from siftkv.kernels.reference.pages import take_pages
from siftkv.kernels.state import CacheState, table_column
from siftkv.policies import Policy

_AT_ONCE = 1 << 16
"""Pages that are filled at a time."""


@torch.inference_mode()
def stand(llm: LLM, policy: Policy, lengths: Tensor, seen: Tensor) -> list[int]:
    """Slots of new requests under `policy`: lengths int64 `[B, L, H, T]`, tokens in the pool's tiers, at positions
    spread over the context; seen int64 `[B]`. Keys, values and queries are random, pages scattered over the pool.

    The caller made sure that slots and pages are free.
    """
    cache, state = llm.cache, llm.cache.state
    rule = llm.engine.bind(policy).rule
    slots = [cache.admit(rule) for _ in range(len(lengths))]
    at = torch.tensor(slots, device=lengths.device)
    state.lengths[at] = lengths.to(torch.int32)
    state.seen[at] = seen
    state.window_start[at] = seen - rule.window
    for tensor in (state.window_k, state.window_v, state.queries):
        for slot in slots:
            tensor[slot].normal_()
    span = (seen - rule.window - rule.sinks)[:, None, None].expand(lengths.shape[:3])
    for tier in range(len(state.layouts)):
        _give_pages(state, at, tier, lengths[..., tier], span, rule.sinks)
    return slots


def _give_pages(state: CacheState, at: Tensor, tier: int, lengths: Tensor, span: Tensor, sinks: int) -> None:
    """Fresh pages for one tier: lengths and span int64 `[B, L, H]`."""
    layout = state.layouts[tier]
    held = (-(-lengths // layout.tokens)).flatten()
    ids = take_pages(state, held)
    ids = ids[torch.randperm(len(ids), device=ids.device)]
    owner = torch.repeat_interleave(torch.arange(len(held), device=ids.device), held)
    nth = torch.arange(len(ids), device=ids.device) - (held.cumsum(0) - held)[owner]
    table = state.page_table[at]
    rows = table.flatten(0, 2)  # [B * L * H, ceil(T/2), width], a view
    rows[owner, tier // 2, table_column(state.width, tier, nth)] = ids
    state.page_table[at] = table
    for start in range(0, len(ids), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        one, length = owner[part], lengths.flatten()[owner[part]].clamp_min(1)
        index = nth[part, None] * layout.tokens + torch.arange(layout.tokens, device=ids.device)
        position = sinks + index * span.flatten()[one][:, None] // length[:, None]
        state.pages[ids[part].long()] = _content(layout, position.to(torch.int32))


def _content(layout: PageLayout, position: Tensor) -> Tensor:
    """Pages of random tokens: position int32 `[n, tokens]`; uint8 `[n, page_bytes]`. Scores are small, votes zero."""
    count, device = len(position), position.device
    if layout.format.dense:
        pages = torch.randn(count, layout.page_bytes // 2, dtype=torch.bfloat16, device=device).view(torch.uint8)
    else:
        pages = torch.randint(0, 256, (count, layout.page_bytes), dtype=torch.uint8, device=device)
        fill_metadata(pages, layout)
    scores, positions, votes = layout.offsets[4:7]
    if layout.tier.scores:
        random = torch.randint(0, 0x2000, position.shape, dtype=torch.int16, device=device)
        pages[:, scores : scores + 2 * layout.tokens] = random.view(torch.uint8)
    if layout.tier.positions:
        pages[:, positions : positions + 4 * layout.tokens] = position.view(torch.uint8)
    if layout.tier.votes:
        pages[:, votes : votes + 2 * layout.tokens] = 0
    return pages
