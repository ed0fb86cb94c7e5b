"""Hard-KV's selection over all layers and heads of a request at once, for settings that no kernel serves.

The semantics are those of a trigger that goes layer by layer (`siftkv.engine.cascade`), operation for operation; what
differs is that there are as many operations for all layers as there would be for one, and that the host waits for none
of them: a GPU takes about as long for a small operation whatever its size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.cache.request_tokens import add_votes, last_queries, request_tokens
from siftkv.kernels.state import CacheState, Selection
from siftkv.policies.hardkv import HardKV
from siftkv.policies.hardkv.fit import Ballot, fit
from siftkv.policies.hardkv.rows import LayerTokens
from siftkv.policies.hardkv.selection import coverage

_MOST_BYTES = 1 << 26
"""Of tokens that are read at a time: some sixteen times as much is in use meanwhile."""


@torch.inference_mode()
def select_together(
    state: CacheState, slot: int, policy: HardKV, sources: tuple[int, ...], seen: int, most_tokens: int
) -> Selection:
    """Which candidates of the request in `slot` its last queries keep, in rank mode: `HardKV.vote` and `fit` for all
    heads. Votes are added to those stored beside the tokens.

    sources: every tier in which the request has tokens, those of the oldest first. seen: tokens of the request.
    most_tokens: of all heads, for a budget in bytes. Nothing is read by the host; the current stream is used.
    """
    layers, heads = state.lengths.shape[1:3]
    most = max(1, seen - min(seen, policy.sinks + policy.window))
    parts = [
        _poll(state, slot, policy, sources, seen, most, part)
        for part in _parts(layers * heads, most * max(state.layouts[tier].token_bytes for tier in sources))
    ]
    candidate, near, now, total, mass, share = (torch.cat(x) for x in zip(*parts, strict=True))
    [keep] = fit(policy, [Ballot(candidate, now, total, mass)], most_tokens)
    by_place = _by_place(keep, candidate, most)
    return Selection(
        keep=by_place.unflatten(0, (layers, heads)),
        kept=keep.sum(-1, dtype=torch.int32).unflatten(0, (layers, heads)),
        mass=coverage(share, keep | near).unflatten(0, (layers, heads)),
    )


def _parts(heads: int, head_bytes: int) -> list[slice]:
    """Heads in parts whose tokens are not too many bytes."""
    at_once = max(1, _MOST_BYTES // head_bytes)
    return [slice(first, min(heads, first + at_once)) for first in range(0, heads, at_once)]


def _poll(
    state: CacheState, slot: int, policy: HardKV, sources: tuple[int, ...], seen: int, most: int, part: slice
) -> tuple[Tensor, ...]:
    """Let the last queries of some heads vote, and add the votes to those beside the tokens. `[h, n]` each: candidates,
    tokens in the window, votes of this trigger, votes so far, mean attention and shares of it.
    """
    tokens = request_tokens(state, slot, part, sources, most)
    q, position = last_queries(state, slot, part, seen)
    candidate = tokens.tier >= 0
    found = policy.vote(LayerTokens(q, position, tokens.k, tokens.position, candidate, tokens.weight, tokens.score))
    add_votes(state, slot, part, tokens, found.votes)
    near = (tokens.position >= 0) & ~candidate
    return candidate, near, found.votes, tokens.votes + found.votes, found.mass, found.share


def _by_place(keep: Tensor, candidate: Tensor, most: int) -> Tensor:
    """`keep` (bool `[h, n]`, in time order) by each candidate's place among the candidates of its head: uint8 `[h,
    most]`.
    """
    place = torch.where(candidate, candidate.cumsum(-1) - 1, most)
    found = torch.zeros(len(keep), most + 1, dtype=torch.uint8, device=keep.device)
    return found.scatter_(1, place, keep.to(torch.uint8))[:, :most].contiguous()
