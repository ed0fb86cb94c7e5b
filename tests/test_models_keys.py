"""Key statistics, the scaling that is folded into the weights, and what conditioning takes from them."""

from dataclasses import replace

import pytest
import torch

from siftkv.cache import build_conditioning
from siftkv.engine.conditioning import condition
from siftkv.models import LoadedModel
from siftkv.models.keys import condition_keys, key_scales
from siftkv.models.statistics import KeyStatistics, measure_keys, sample_ids
from tests.models_helpers import DenseAttention
from tests.tiny import VOCAB, prompt, tiny_model

FAMILIES: list[dict[str, object]] = [
    {},
    {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "num_heads": 6},
    {"architecture": "Qwen3ForCausalLM", "qk_norm": True},
]


class WordTokenizer:
    """Gives every word a number, so that a text has many different tokens."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [sum(map(ord, word)) % VOCAB for word in text.split()]}


def logits(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    attend, decoder = DenseAttention(1), model.decoder
    attend.lengths = [len(ids)]
    return decoder.logits(decoder(torch.tensor(ids), torch.arange(len(ids)), attend))


def uneven_model(**changes: object) -> LoadedModel:
    """Keys whose channels differ in size, queries that do not."""
    model = tiny_model(**changes)
    config = model.config
    first, last = config.num_heads, config.num_heads + config.num_kv_heads
    sizes = torch.linspace(-3, 3, config.head_dim).exp().roll(3)
    for layer in model.decoder.layers:
        if layer.qk_norm is not None:
            layer.qk_norm[first:] *= sizes
        else:
            layer.qkv.view(-1, config.head_dim, config.hidden_size)[first:last] *= sizes[:, None]
    return model


@pytest.mark.parametrize("changes", FAMILIES, ids=["llama", "qwen2", "qwen3"])
def test_scaling_changes_no_bit_of_the_logits(changes: dict[str, object]) -> None:
    plain, folded = uneven_model(**changes), uneven_model(**changes)
    known = condition_keys(folded.decoder, measure_keys(folded.decoder, prompt(80)))
    scale = key_scales(measure_keys(plain.decoder, prompt(80)))
    assert (scale != 1).any()
    assert torch.equal(logits(plain, prompt(30, 1)), logits(folded, prompt(30, 1)))
    assert condition_keys(folded.decoder, known) is known, "a second call folds nothing"
    after = measure_keys(folded.decoder, prompt(80))
    torch.testing.assert_close(after.mean, known.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.spread, known.spread, rtol=1e-4, atol=1e-5)


def test_scales_are_powers_of_two_shared_by_a_pair() -> None:
    g = torch.Generator().manual_seed(0)
    spread, size = torch.rand(2, 3, 2, 16, generator=g).exp().unbind(0)
    scale = key_scales(KeyStatistics(torch.zeros_like(spread), spread, size))
    assert torch.equal(scale.log2(), scale.log2().round())
    assert torch.equal(scale[..., :8], scale[..., 8:])
    own = ((size * scale).square().sum(-1) * (spread / scale).square().mean(-1)).mean()
    assert own <= (size.square().sum(-1) * spread.square().mean(-1)).mean()


def test_the_mean_of_keys_is_measured_before_rotation() -> None:
    """With a bias and no weights every key is the bias, wherever it stands."""
    model = tiny_model(architecture="Qwen2ForCausalLM", qkv_bias=True)
    for layer in model.decoder.layers:
        layer.qkv.zero_()
    found = measure_keys(model.decoder, prompt(100))
    expected = torch.stack([model.decoder.key_bias(i) for i in range(2)])  # type: ignore[misc]
    torch.testing.assert_close(found.mean, expected, rtol=1e-4, atol=1e-5)
    assert found.spread.max() < 1e-4


def test_what_keys_share_is_removed_and_logits_stay() -> None:
    model = replace(uneven_model(), tokenizer=WordTokenizer())  # type: ignore[arg-type]
    before = logits(model, prompt(30, 2))
    found = condition(model)
    assert model.decoder.key_statistics is not None
    assert found.rotates
    torch.testing.assert_close(logits(model, prompt(30, 2)), before, rtol=1e-3, atol=1e-4)
    again = condition(model)
    assert torch.equal(again.bias, found.bias)
    assert torch.equal(logits(model, prompt(30, 2)), logits(model, prompt(30, 2)))


def test_pairs_that_are_outliers_go_beyond_the_usual_number() -> None:
    half = 32
    angle = torch.arange(8)[:, None] * torch.ones(half)
    spread = [torch.ones(1, 2 * half)]

    def rank(strong: int, weak: int) -> int:
        bias = torch.zeros(1, 2 * half)
        bias[0, :strong], bias[0, strong : strong + weak] = 10.0, 1.5
        return int(build_conditioning(1, 1, 2 * half, angle.cos(), angle.sin(), [bias], spread).rank[0, 0])

    assert rank(0, 0) == 0
    assert rank(0, 5) == 8
    assert rank(0, 30) == 16
    assert rank(20, 10) == 24


def test_a_sample_is_empty_without_a_tokenizer_of_text() -> None:
    assert sample_ids(object(), VOCAB) == []
    assert len(sample_ids(WordTokenizer(), VOCAB, 100)) == 100
