"""What prompt tokens are worth, from a layer's queries and keys: the parts that published rankings are made of.

Shapes: R prompts, n tokens, H kv heads, G query heads a kv head, D head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.errors import PolicyError
from siftkv.kernels import ranking
from siftkv.policies.base import PromptView, check_whole

_MOST_ELEMENTS = 1 << 24
"""Attention logits that are held at a time."""

POOLINGS = ("max", "avg")
MOST_POOLED = ranking.MOST_POOLED


def check_pool(kernel: int, pooling: str) -> None:
    """Raise PolicyError unless a pool over neighbouring tokens is usable."""
    check_whole("kernel", kernel, 1, MOST_POOLED)
    if kernel % 2 == 0:
        raise PolicyError(f"kernel={kernel}: use an odd number of positions, a token and as many on either side")
    if pooling not in POOLINGS:
        raise PolicyError(f"pooling={pooling!r}: use {', '.join(POOLINGS)}")


def last_attention(prompt: PromptView, count: int) -> Tensor:
    """Mean attention that each token gets from the last `count` queries, each query head after its own causal softmax:
    fp32 `[R, H, G, n]`.

    Where a caller has only scores they stand for it, as a group of one.
    """
    if prompt.q is None or prompt.k is None:
        return prompt.score[:, :, None]
    length, count = prompt.length, min(count, prompt.length)
    heads, dim = prompt.k.shape[2:]
    keys = prompt.k.float().permute(0, 2, 3, 1)[:, :, None]  # [R, H, 1, D, n]
    query = prompt.q[:, length - count :].float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)  # [R, H, G, W, D]
    position = prompt.position
    total = torch.zeros(*query.shape[:3], length, device=query.device)
    block = max(1, _MOST_ELEMENTS // max(1, total.numel()))
    for at in range(0, count, block):
        part = query[..., at : at + block, :]
        row = position[length - count + at :][: part.shape[-2]]
        logits = (part @ keys) / math.sqrt(dim)
        total += logits.masked_fill_(position > row[:, None], -math.inf).softmax(-1).sum(-2)
    return total / count


def pooled(score: Tensor, kernel: int, pooling: str) -> Tensor:
    """Maximum or mean of each score's `kernel` neighbours along the last dimension, fp32 in the shape of `score`.

    A mean counts what lies beyond the ends as 0, as in the code of SnapKV's authors.
    """
    if kernel == 1 or not score.shape[-1]:
        return score
    flat = score.flatten(0, -2)
    pool = F.max_pool1d if pooling == "max" else F.avg_pool1d
    return pool(flat, kernel, stride=1, padding=kernel // 2).view(score.shape)


def observed(prompt: PromptView, window: int, kernel: int, pooling: str) -> Tensor:
    """SnapKV's score, fp32 `[R, H, n]`: mean attention from the last `window` queries to the tokens before them, pooled
    over neighbours; 0 for the window itself.

    Source: "SnapKV" (arXiv 2404.14469), section 4. The paper has a KV head for every query head; a group of query heads
    is averaged after pooling.
    """
    before = max(0, prompt.length - window)
    past = pooled(last_attention(prompt, window)[..., :before], kernel, pooling).mean(2)
    return F.pad(past, (0, prompt.length - before))
