"""Prompt kernels: importance of every prompt token, and placing what a layer keeps into pages and the window."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from siftkv.kernels.prompts import PromptBatch, measure_one_by_one, store_one_by_one
from siftkv.kernels.reference.condition import condition_keys
from siftkv.kernels.reference.pages import extend_tier
from siftkv.kernels.reference.quantize import encode
from siftkv.kernels.reference.tokens import is_plain, page_of, write_records
from siftkv.kernels.state import CacheState, window_row

_CHUNK_ELEMENTS = 1 << 20
"""Attention probabilities that are held at a time."""


def prompt_importance(q: Tensor, k: Tensor, rows: Tensor, weight: Tensor, lse: Tensor | None = None) -> Tensor:
    """Weighted mean attention that each token got from later query rows, maximum over the GQA group of each head's own
    softmax.

    q: `[N, Hq, D]`, k: `[N, H, D]`, of one request, after RoPE. rows: `[M]` int64 ascending, the query rows that count;
        weight: `[M]` fp32, how many
    queries each stands for. Returns fp32 `[H, N]`: `sum_{r > i} w_r p_r(i) / sum_{r > i} w_r`, 0 for a token that no
    row follows.
    lse: fp32 `[Hq, N]`, each query's natural log-sum-exp, where prompt attention has left it; spares a pass.
    With every row at weight 1 this is the paper's mean over all later queries (DiffKV, section 4.2); with the last W
    rows, an observation window.
    """
    tokens, heads, dim = k.shape
    group = q.shape[1] // heads
    keys = k.transpose(0, 1).float()
    total = torch.zeros(heads, tokens, device=q.device)
    position = torch.arange(tokens, device=q.device)
    chunk = max(1, _CHUNK_ELEMENTS // (q.shape[1] * tokens))
    for at in range(0, len(rows), chunk):
        row = rows[at : at + chunk]
        visible = int(row[-1]) + 1
        query = q[row].float().view(-1, heads, group, dim).permute(1, 2, 0, 3)
        logits = (query @ keys[:, None, :visible].transpose(-1, -2)) / math.sqrt(dim)
        logits.masked_fill_(position[:visible] > row[:, None], -math.inf)
        if lse is None:
            attention = torch.softmax(logits, -1).amax(1)
        else:
            attention = torch.exp(logits - lse[:, row].view(heads, group, -1, 1)).amax(1)
        later = weight[at : at + chunk, None] * (position[:visible] < row[:, None])
        total[:, :visible] += (attention * later).sum(1)
    followers = torch.zeros(tokens, device=q.device).index_add_(0, rows, weight)
    count = followers.flip(0).cumsum(0).flip(0) - followers
    return total / count.clamp_min(torch.finfo(torch.float32).tiny)


def write_window(
    state: CacheState, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor
) -> None:
    """Put tokens into the window: k, v `[n, H, D]`, score fp32 `[H, n]`, position int64 `[n]` (sinks or the most recent
    ones).
    """
    row = window_row(state, position, state.sinks[slot])
    state.window_k[slot, layer][:, row] = k.transpose(0, 1).to(state.window_k.dtype)
    state.window_v[slot, layer][:, row] = v.transpose(0, 1).to(state.window_v.dtype)
    state.window_score[slot, layer][:, row] = score


def append_tokens(
    state: CacheState, layer: int, slot: int, k: Tensor, v: Tensor, score: Tensor, position: Tensor, tier: Tensor
) -> None:
    """Append tokens to the tiers of one layer, in the order given: k, v `[n, H, D]` plain keys, score fp32 `[H, n]`,
    position int64 `[n]`.

    tier: int8 `[H, n]`, the tier of each token for each head, -1 = dropped. Pages are taken for what is kept and for
        nothing else; the caller made
    sure that they are there.
    """
    c = state.conditioning
    plain_k, values = k.transpose(0, 1).float(), v.transpose(0, 1).float()
    conditioned = condition_keys(c, plain_k, c.bias[layer][:, None], position)
    for index, layout in enumerate(state.layouts):
        chosen = tier == index
        count = chosen.sum(-1)
        start = state.lengths[slot, layer, :, index].long()
        extend_tier(state, layer, slot, index, count)
        head, token = chosen.nonzero(as_tuple=True)
        in_tier = start[head] + (chosen.cumsum(-1) - 1)[head, token]
        keys = plain_k if is_plain(layout) else conditioned
        record = encode(layout, keys[head, token], values[head, token], score[head, token], position[token])
        page = page_of(state, state.page_table[slot, layer][head], index, in_tier[:, None])[:, 0]
        write_records(state, index, page, in_tier, record)


def measure_prompts(batch: PromptBatch, q: Tensor, k: Tensor, lse: Tensor | None = None) -> Tensor:
    """`prompt_importance` of several prompts: q `[T, Hq, D]`, k `[T, H, D]`, lse fp32 `[Hq, T]` laid end to end.

    Returns fp32 `[H, T]`, zeros for prompts without measured rows.
    """
    return measure_one_by_one(prompt_importance, batch, q, k, lse)


def store_prompts(
    state: CacheState, layer: int, batch: PromptBatch, k: Tensor, v: Tensor, score: Tensor, tier: Tensor
) -> None:
    """Keep one layer of several prompts: k, v `[T, H, D]`, score fp32 `[H, T]`, tier int8 `[H, T]` (-1 = dropped).

    Tokens outside the prompts' middles go to the window, whatever their tier says.
    """
    store_one_by_one(write_window, append_tokens, state, layer, batch, k, v, score, tier)
