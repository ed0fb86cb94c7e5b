"""R-KV against its formula, written out for one head at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from siftkv.errors import PolicyError
from siftkv.policies import parse_policy
from tests.policies.views import D, G, H, N, R, chosen, top, view_of


@pytest.mark.parametrize("share", [0.07, 0.9])
def test_attention_less_redundancy(share: float) -> None:
    policy = parse_policy(f"rkv:budget=40,share={share}")
    view = view_of(policy)
    assert view.q is not None
    assert view.k is not None
    view.k[:, 20:30] = view.k[:, 10:20] * 1.2  # near-duplicates
    tier = policy.classify(view)
    before = N - 8
    for prompt in range(R):
        for head in range(H):
            keys = view.k[prompt, :, head]
            queries = view.q[prompt, before:, head * G : (head + 1) * G]
            logits = torch.stack([queries[:, g] @ keys[:before].T / math.sqrt(D) for g in range(G)]).amax(0)
            vote = logits.softmax(-1).mean(0)
            attention = torch.stack([vote[max(0, i - 3) : i + 4].max() for i in range(before)])
            unit = F.normalize(keys, dim=-1)
            cosine = (unit @ unit.T).fill_diagonal_(0.0)
            for row in cosine:
                alike = (row > 0.5).nonzero()
                if len(alike):
                    row[alike[-1]] = 0.0
            similarity = cosine.mean(0).softmax(-1)
            score = share * attention - (1 - share) * similarity[:before]
            assert chosen(view, tier, prompt, head) == top(score, 40 - 8)


def test_of_duplicates_the_last_stays() -> None:
    policy = parse_policy("rkv:budget=60,share=0.0,alike=0.95")
    view = view_of(policy)
    assert view.k is not None
    view.k[:, 10:30:4] = view.k[:, 10:11]  # five of the same
    stays = policy.classify(view)[0, 0] >= 0
    assert stays[10:30:4].tolist() == [False, False, False, False, True]


def test_bad_settings() -> None:
    with pytest.raises(PolicyError, match="share"):
        parse_policy("rkv:share=1.5")
    with pytest.raises(PolicyError, match="alike"):
        parse_policy("rkv:alike=-0.5")
