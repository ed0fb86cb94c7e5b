"""Each metric against its definition, and what it must not depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from siftkv.policies.hardkv import metrics
from siftkv.policies.hardkv.metrics import RKV, SnapKV, redundancy
from siftkv.policies.hardkv.rows import attention_rows
from tests.hardkv.layers import layer


def test_pooling_of_a_whole_context_is_a_max_pool() -> None:
    tokens = layer(1, window=20, rows=4)
    rows = attention_rows(tokens)
    expected = F.max_pool1d(rows.logits.flatten(0, 1), 7, 1, 3).view_as(rows.logits)
    expected = expected.masked_fill(~rows.visible, -torch.inf)
    assert torch.equal(SnapKV(7).logits(rows, tokens), expected)


def test_pooling_goes_by_position_not_by_place() -> None:
    tokens = layer(2, gaps=True)
    rows = attention_rows(tokens)
    pooled = SnapKV(5).logits(rows, tokens)
    for h in range(2):
        for t in range(0, 60, 7):
            near = (tokens.position[h] - tokens.position[h, t]).abs() <= 2
            expected = rows.logits[h, :, near].amax(-1).masked_fill(~rows.visible[h, :, t], -torch.inf)
            assert torch.equal(pooled[h, :, t], expected)


def slow_redundancy(k: torch.Tensor, alike: float) -> torch.Tensor:
    """R-KV's redundancy with the whole similarity matrix of one head."""
    unit = F.normalize(k, dim=-1)
    cosine = unit @ unit.T
    cosine.fill_diagonal_(0.0)
    for row in cosine:
        close = (row > alike).nonzero()[:, 0]
        if len(close):
            row[close[-1]] = 0.0
    return cosine.mean(0)


def test_redundancy_in_blocks_equals_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    k = layer(3, count=50).k
    k[:, 7], k[:, 31] = k[:, 20], k[:, 20] * 1.1
    known = torch.ones(2, 50, dtype=torch.bool)
    expected = torch.stack([slow_redundancy(x, 0.5) for x in k])
    torch.testing.assert_close(redundancy(k, known, 0.5), expected)
    monkeypatch.setattr(metrics, "_MOST_PAIRS", 7 * 2 * 50)
    torch.testing.assert_close(redundancy(k, known, 0.5), expected)


def test_a_copy_of_a_token_ranks_below_a_singular_one() -> None:
    tokens = layer(4, count=40, window=4, rows=2, group=1)
    k = tokens.k.clone()
    k[:, 5:15] = k[:, 5:6]  # ten copies
    tokens = replace(tokens, k=k)
    rows = attention_rows(tokens)
    logits = RKV(share=0.0).logits(rows, tokens).mean(1)
    others = torch.ones(40, dtype=torch.bool)
    others[5:15] = False
    others[-2:] = False  # not seen by every row
    assert (logits[:, 5:14].amax(-1) < logits[:, others].amin(-1)).all()
