"""The streaming meter against a direct computation over all positions at once."""

from __future__ import annotations

import math

import pytest
import torch

from siftkv.errors import NumericsError, RequestError
from siftkv.evaluate.divergence import DivergenceMeter

POSITIONS, CANDIDATES, VOCAB = 40, 3, 50


def test_agrees_with_direct_computation() -> None:
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(POSITIONS, VOCAB, generator=generator) * 3
    sifted = (
        full[:, None]
        + torch.randn(POSITIONS, CANDIDATES, VOCAB, generator=generator) * torch.tensor([0.1, 1, 3.0])[:, None]
    )
    target = torch.randint(VOCAB, (POSITIONS,), generator=generator)
    meter = DivergenceMeter()
    for i in range(POSITIONS):
        meter.update(full[i], sifted[i], int(target[i]))
    for row, found in enumerate(meter.results()):
        p, q = full.double().softmax(-1), sifted[:, row].double().softmax(-1)
        kl = (p * (p / q).log()).sum(-1)
        assert found.positions == POSITIONS
        assert found.kl == pytest.approx(kl.tolist(), rel=1e-9)
        assert found.mean_kl == pytest.approx(kl.mean().item())
        assert found.p90_kl == pytest.approx(kl.quantile(0.9).item())
        assert found.worst_decile_kl == pytest.approx(kl.sort().values[-POSITIONS // 10 :].mean().item())
        assert found.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
        index = torch.arange(POSITIONS)
        perplexity = [math.exp(-x[index, target].log().mean().item()) for x in (p, q)]
        assert found.perplexity_ratio == pytest.approx(perplexity[1] / perplexity[0])
        assert math.exp(found.reference_nll) == pytest.approx(perplexity[0])
    kls = [found.mean_kl for found in meter.results()]
    assert kls == sorted(kls)
    assert kls[0] < kls[2]


def test_equal_logits_have_no_divergence_even_in_half_precision() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()
    meter = DivergenceMeter()
    meter.update(logits, logits, 3)
    [found] = meter.results()
    assert (found.mean_kl, found.worst_decile_kl, found.top1_agreement, found.perplexity_ratio) == (0.0, 0.0, 1.0, 1.0)


def test_banned_tokens_add_nothing() -> None:
    full, sifted = torch.zeros(4), torch.zeros(4)
    full[3] = sifted[3] = -math.inf
    meter = DivergenceMeter()
    meter.update(full, sifted, 0)
    assert meter.results()[0].mean_kl == 0.0


def test_what_does_not_fit_is_refused() -> None:
    meter = DivergenceMeter()
    with pytest.raises(RequestError, match="nothing was compared"):
        meter.results()
    with pytest.raises(RequestError, match="cannot be compared"):
        meter.update(torch.zeros(5), torch.zeros(2, 4), 0)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        meter.update(torch.zeros(5), torch.zeros(2, 5), 5)
    with pytest.raises(NumericsError):
        meter.update(torch.zeros(5), torch.full((2, 5), math.nan), 0)
    meter.update(torch.zeros(5), torch.zeros(2, 5), 0)
    with pytest.raises(RequestError, match="2 candidates"):
        meter.update(torch.zeros(5), torch.zeros(3, 5), 0)
