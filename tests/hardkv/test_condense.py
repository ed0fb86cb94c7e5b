"""Merging keeps the softmax sum and the output at the reference query, and loses less than eviction elsewhere."""

from __future__ import annotations

import torch

from siftkv.policies.hardkv import condense
from siftkv.policies.hardkv.condense import log_sum_exp, merge, reference_query

H, N, D = 3, 40, 16


def tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(H, N, D, generator=generator) for _ in range(2))
    weight = torch.randn(H, N, generator=generator) * 0.3
    reference = torch.randn(H, D, generator=generator) * 2
    keep = torch.rand(H, N, generator=generator) < 0.4
    victim = ~keep & (torch.rand(H, N, generator=generator) < 0.8)
    return k, v, weight, reference, keep, victim


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, known: torch.Tensor
) -> torch.Tensor:
    logit = torch.einsum("hd,hnd->hn", q, k) * D**-0.5 + weight
    return torch.einsum("hn,hnd->hd", logit.masked_fill(~known, -torch.inf).softmax(-1), v)


def test_mass_and_output_at_the_reference_query_are_exact() -> None:
    for seed in range(5):
        k, v, weight, reference, keep, victim = tokens(seed)
        rest = ~keep & ~victim
        merged = merge(k, v, weight, reference, keep, victim)
        changed = merged.changed[..., None]
        new_k, new_v = torch.where(changed, merged.k, k), torch.where(changed, merged.v, v)
        new_weight = torch.where(merged.changed, merged.weight, weight)
        everything, left = keep | victim | rest, keep | rest
        before = log_sum_exp(reference[:, None], k, weight, everything)
        after = log_sum_exp(reference[:, None], new_k, new_weight, left)
        torch.testing.assert_close(before, after, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            attend(reference, k, v, weight, everything), attend(reference, new_k, new_v, new_weight, left)
        )


def test_untouched_tokens_are_not_changed() -> None:
    k, v, weight, reference, keep, victim = tokens(7)
    merged = merge(k, v, weight, reference, keep, victim & False)
    assert not merged.changed.any()
    merged = merge(k, v, weight, reference, keep, victim)
    assert (merged.changed <= keep).all()
    assert merged.changed.any()


def test_a_head_that_keeps_nothing_merges_nothing() -> None:
    k, v, weight, reference, keep, victim = tokens(8)
    keep[1] = False
    merged = merge(k, v, weight, reference, keep, victim)
    assert not merged.changed[1].any()
    assert merged.changed[0].any()


def test_victims_join_the_most_similar_key(monkeypatch: object) -> None:
    k, v, weight, reference, keep, victim = tokens(9)
    keep, victim = torch.zeros_like(keep), torch.zeros_like(victim)
    keep[:, [3, 20]] = True
    victim[:, 11] = True
    k[:, 11] = k[:, 20] * 0.9 + 0.01
    assert merge(k, v, weight, reference, keep, victim).changed[:, 20].all()
    assert not merge(k, v, weight, reference, keep, victim).changed[:, 3].any()


def test_blocks_give_the_same() -> None:
    given = tokens(10)
    whole = merge(*given)
    old, condense._BLOCK = condense._BLOCK, 7
    try:
        parts = merge(*given)
    finally:
        condense._BLOCK = old
    torch.testing.assert_close(whole.k, parts.k)
    assert torch.equal(whole.changed, parts.changed)


def test_the_reference_query_is_the_mean_of_a_group() -> None:
    q = torch.randn(5, 6, D, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(reference_query(q, 3)[1], q[:, 2:4].mean((0, 1)))


def test_merging_drifts_less_than_eviction_over_many_triggers() -> None:
    """50 triggers, 8 new tokens each, 24 kept: the error of the log of the softmax sum at queries like the recent."""
    generator = torch.Generator().manual_seed(11)
    centre = torch.randn(1, 1, D, generator=generator)
    all_k = torch.randn(1, 24 + 50 * 8, D, generator=generator) + 0.5 * centre
    states = {name: (all_k[:, :24], torch.zeros(1, 24)) for name in ("evict", "merge")}
    error: dict[str, float] = {}
    for turn in range(50):
        end = 24 + (turn + 1) * 8
        q = centre + 0.5 * torch.randn(1, 6, D, generator=generator)
        truth = log_sum_exp(q, all_k[:, :end], torch.zeros(1, end), torch.ones(1, end, dtype=torch.bool))
        for name, (k, weight) in states.items():
            k = torch.cat([k, all_k[:, end - 8 : end]], 1)
            weight = torch.cat([weight, torch.zeros(1, 8)], 1)
            logit = (q @ k.transpose(1, 2) * D**-0.5 + weight[:, None]).softmax(-1).mean(1)
            keep = torch.zeros(logit.shape, dtype=torch.bool).scatter_(1, logit.topk(24).indices, True)
            if name == "merge":
                found = merge(k, k, weight, q.mean(1), keep, ~keep)
                k = torch.where(found.changed[..., None], found.k, k)
                weight = torch.where(found.changed, found.weight, weight)
            states[name] = (k[keep][None], weight[keep][None])
            known = torch.ones(1, 24, dtype=torch.bool)
            error[name] = float((log_sum_exp(q, *states[name], known) - truth).abs().mean())
    assert error["merge"] < 0.1 * error["evict"]
