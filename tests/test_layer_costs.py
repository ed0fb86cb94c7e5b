"""Costs of layers: what one pass with a copy for every layer finds is what a pass for each layer finds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv import LLM
from siftkv.engine.layer_costs import layer_costs, measure_layers
from siftkv.models import Decoder, random_model
from siftkv.policies.worth import mean_squares, pooled
from tests.tiny import VOCAB, tiny_config, tiny_model

ASKED = 12


def outspoken() -> Decoder:
    """A decoder whose answers depend on its attention."""
    decoder = random_model(tiny_config(num_layers=3, qkv_bias=True), 3, torch.float32)
    for layer in decoder.layers:
        layer.qkv *= 12
        layer.o *= 12
    return decoder


def answers(decoder: Decoder, ids: Tensor, forgetful: int | None) -> Tensor:
    """Log-probabilities after each of the last tokens, where one layer has lost prompt tokens."""
    n, start = len(ids), len(ids) - ASKED

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(n, n, dtype=torch.bool).tril().repeat(k.shape[1], 1, 1)
        if layer == forgetful:
            recent, distant = mean_squares(q[None, :start], k[None, :start], 256, 256)
            worth = (pooled(recent, 5) + 0.3 * distant)[0] * v[:start].square().sum(-1).T
            worth[:, :4] = worth[:, -16:] = torch.inf
            lost = worth.flatten().argsort()[: int(0.75 * worth.numel())]
            kept = torch.ones(worth.numel(), dtype=torch.bool).index_fill(0, lost, False).view(worth.shape)
            seen[:, start:, :start] = kept[:, None]
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        seen = seen.repeat_interleave(group, 0)
        return F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=seen).transpose(0, 1)

    with torch.inference_mode():
        return decoder.logits(decoder(ids, torch.arange(n), attend)[start:]).log_softmax(-1)


def test_costs_are_the_divergence_of_a_pass_without_the_lost_tokens() -> None:
    decoder = outspoken()
    ids = torch.randint(1, VOCAB, (120,), generator=torch.Generator().manual_seed(1))
    exact = answers(decoder, ids, None)
    expected = [(exact.exp() * (exact - answers(decoder, ids, i))).sum(-1).mean() for i in range(3)]
    found = measure_layers(decoder, ids.tolist(), ASKED)
    assert float(found.min()) > 1e-4, "else there is nothing to compare"
    torch.testing.assert_close(found, torch.stack(expected), rtol=2e-3, atol=1e-6)


def test_16_bit_models_are_measured_in_fp32() -> None:
    decoder = outspoken()
    ids = torch.randint(1, VOCAB, (120,), generator=torch.Generator().manual_seed(2)).tolist()
    rounded = outspoken().to(torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(
        measure_layers(rounded, ids, ASKED), measure_layers(decoder, ids, ASKED), rtol=0.5, atol=0
    )


def test_a_tokenizer_without_words_measures_nothing() -> None:
    model = tiny_model()
    assert layer_costs(model.decoder, None) == ()
    assert LLM(tiny_model(), "sift", kernels="reference").engine.runner.decoder.layer_costs == ()


def test_policies_that_treat_layers_alike_ask_for_no_costs() -> None:
    llm = LLM(tiny_model(), "sift:tilt=0", kernels="reference")
    assert llm.engine.runner.decoder.layer_costs is None
