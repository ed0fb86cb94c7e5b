"""What a cache answers: exact attention to what it holds, and the same beside any other request."""

from __future__ import annotations

import pytest
import torch

from tests.cache.helpers import POLICIES
from tests.tiny import random_prompt, random_step, small_cache


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q `[Hq, D]`, k, v `[n, H, D]` to `[Hq, D]`."""
    query = q.view(k.shape[1], -1, k.shape[2])
    p = torch.softmax(torch.einsum("hgd,nhd->hgn", query, k) / k.shape[2] ** 0.5, -1)
    return torch.einsum("hgn,nhd->hgd", p, v).reshape(q.shape)


def test_full_cache_attends_exactly(kernels: str) -> None:
    cache, [full] = small_cache(["full:window=4"], kernels=kernels)
    generator = torch.Generator().manual_seed(0)
    slots = [cache.admit(full.rule) for _ in range(2)]
    history = [random_prompt(cache, full, slot, n, generator) for slot, n in zip(slots, (1, 23))]
    for _ in range(40):
        for layer, (q, k, v, out) in enumerate(random_step(cache, slots, generator)):
            for row in range(2):
                keys, values = history[row][layer]
                keys, values = torch.cat([keys, k[row : row + 1]]), torch.cat([values, v[row : row + 1]])
                history[row][layer] = (keys, values)
                torch.testing.assert_close(out[row], dense_attention(q[row], keys, values), rtol=1e-4, atol=1e-5)
        cache.check_integrity()


@pytest.mark.parametrize("bias", [0.0, 8.0])
def test_conditioning_is_exact(bias: float, kernels: str) -> None:
    """With 8-bit keys the conditioned cache answers like the plain one: the bias term and the rotation cancel."""
    outs = []
    for conditioning in ("full", "none"):
        cache, [policy] = small_cache(
            ["uniform:k8v8,window=4,sinks=1"], bias=bias, conditioning=conditioning, kernels=kernels
        )
        generator = torch.Generator().manual_seed(5)
        slot = cache.admit(policy.rule)
        random_prompt(cache, policy, slot, 60, generator)
        outs.append(torch.stack([x[3] for _ in range(12) for x in random_step(cache, [slot], generator)]))
    assert cache.state.conditioning.has_bias is False
    assert (outs[0] - outs[1]).norm() / outs[1].norm() < (0.05 if bias else 0.02)


def test_a_batch_mate_changes_nothing(kernels: str) -> None:
    def run(with_mates: bool) -> tuple[torch.Tensor, torch.Tensor]:
        cache, bound = small_cache(POLICIES, kernels=kernels)
        slot = cache.admit(bound[0].rule)
        random_prompt(cache, bound[0], slot, 70, torch.Generator().manual_seed(1))
        slots = [slot]
        for i, policy in enumerate(bound[1:] if with_mates else []):
            slots.append(cache.admit(policy.rule))
            random_prompt(cache, policy, slots[-1], 30 + i, torch.Generator().manual_seed(9 + i))
        outs = []
        generator = torch.Generator().manual_seed(2)
        for _ in range(30):
            spec, index = cache.spec, torch.tensor(slots)
            for layer in range(spec.num_layers):
                own = [torch.randn(1, h, spec.head_dim, generator=generator) for h in (4, 2, 2)]
                q, k, v = (torch.cat([x, torch.randn(len(slots) - 1, *x.shape[1:])]) for x in own)
                outs.append(cache.attend(layer, index, q, k, v)[0])
            cache.step(index)
        return torch.stack(outs), cache.state.lengths[slot].clone()

    (alone, lengths_alone), (together, lengths_together) = run(False), run(True)
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-6)
    assert torch.equal(lengths_alone, lengths_together)
