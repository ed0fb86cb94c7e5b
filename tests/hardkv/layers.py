"""Random layers for tests of selection."""

from __future__ import annotations

import torch

from siftkv.policies.hardkv.rows import LayerTokens


def layer(
    seed: int = 0,
    *,
    heads: int = 2,
    group: int = 2,
    dim: int = 16,
    count: int = 60,
    rows: int = 8,
    window: int = 10,
    sinks: int = 2,
    sharp: float = 1.0,
    gaps: bool = False,
) -> LayerTokens:
    """Queries that stand at the last positions of a context whose tokens are all there, or (`gaps`) some of them."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads * group, dim, generator=generator) * sharp
    k = torch.randn(heads, count, dim, generator=generator)
    position = torch.arange(count).expand(heads, count).clone()
    if gaps:
        steps = torch.randint(1, 9, (heads, count - window), generator=generator)
        old = steps.cumsum(-1)
        new = old[:, -1:] + 1 + torch.arange(window)
        position = torch.cat([old, new.max() - new.max(0).values + new], 1)
        position[:, -window:] = position[:, -1].max() - window + 1 + torch.arange(window)
    end = int(position.max()) + 1
    candidate = (position >= sinks) & (position < end - window)
    score = torch.rand(heads, count, generator=generator)
    return LayerTokens(q, torch.arange(end - rows, end), k, position, candidate, None, score)
