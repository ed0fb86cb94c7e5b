"""Random prompts as policies see them, and the plain attention that formulas in tests start from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from siftkv.kernels.reference.prompt import prompt_importance
from siftkv.policies import Policy, PromptView

R, N, H, G, D, LAYERS = 2, 90, 2, 3, 16, 5


def rotary(positions: int = 400, dim: int = D) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(dim // 2) * 2 / dim)
    return angle.cos(), angle.sin()


def view_of(policy: Policy, length: int = N, layer: int = 0, seed: int = 0, prompts: int = R) -> PromptView:
    """`prompts` random prompts, protected and measured as the engine does it for `policy`."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(prompts, length, H * G, D, generator=g) * 1.5
    k, v = (torch.randn(prompts, length, H, D, generator=g) for _ in range(2))
    position = torch.arange(length)
    protected = (position < policy.sinks) | (position >= length - policy.window)
    rows = policy.rows(length)
    score = torch.zeros(prompts, H, length)
    if rows is not None:
        score = torch.stack([prompt_importance(a, b, *rows) for a, b in zip(q, k, strict=True)])
    return PromptView(layer, score, protected, q, k, v, None, rotary(), LAYERS)


def attention(view: PromptView, prompt: int, head: int, member: int) -> Tensor:
    """Causal attention `[n, n]` of one query head of one prompt, written out."""
    assert view.q is not None
    assert view.k is not None
    q, k = view.q[prompt, :, head * G + member], view.k[prompt, :, head]
    logits = q @ k.T / math.sqrt(D)
    return logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -math.inf).softmax(-1)


def kept(view: PromptView, tier: Tensor) -> Tensor:
    """Bool `[R, H, n]`: what stays, protected tokens included."""
    return (tier >= 0) | view.protected


def top(score: Tensor, count: int) -> set[int]:
    """Indices of the `count` largest of a vector."""
    return set(score.topk(count).indices.tolist())


def chosen(view: PromptView, tier: Tensor, prompt: int, head: int) -> set[int]:
    """Tokens of one head that stay beyond the protected ones."""
    return set(((tier[prompt, head] >= 0) & ~view.protected).nonzero()[:, 0].tolist())
