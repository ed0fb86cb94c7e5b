"""The decoder answers like `transformers`, for every family, in prompts, decode steps and ragged batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from siftkv.models import Decoder, ModelConfig, RopeConfig, load_model, random_model
from tests.models_helpers import FAMILIES, VOCAB, DenseAttention, save_random

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:torch")  # transformers renames past_key_values

PROMPT, STEPS = 11, 5
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def tiny(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 64,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


@torch.inference_mode()
def run(decoder: Decoder, ids: Tensor, prompt: int) -> Tensor:
    """Logits [T, V] of one request: a prompt in one forward, then the rest token by token."""
    attend, rows = DenseAttention(1), []
    for start, end in [(0, prompt), *((i, i + 1) for i in range(prompt, len(ids)))]:
        attend.lengths = [end - start]
        lengths = torch.full((end - start,), end)
        hidden = decoder(ids[start:end], torch.arange(start, end), attend, lengths)
        rows.append(decoder.logits(hidden))
    return torch.cat(rows)


@torch.inference_mode()
def run_transformers(model: torch.nn.Module, ids: Tensor, prompt: int) -> Tensor:
    out = model(ids[None, :prompt], use_cache=True)
    rows = [out.logits[0]]
    for i in range(prompt, len(ids)):
        out = model(ids[None, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0])
    return torch.cat(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_decode_steps_equal_transformers(family: str, tmp_path: Path) -> None:
    reference = save_random(FAMILIES[family], tmp_path)
    model = load_model(tmp_path, torch.float32)
    ids = tokens(PROMPT + STEPS)
    expected = run_transformers(reference, ids, PROMPT)
    actual = run(model.decoder, ids, PROMPT)
    assert actual.dtype is torch.float32
    assert expected.std() > 0.1, "logits that are all alike would compare equal whatever the decoder does"
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize(("prompt", "total"), [(60, 70), (80, 85)])
def test_dynamic_ntk_follows_the_length_of_the_request(prompt: int, total: int, tmp_path: Path) -> None:
    reference = save_random(FAMILIES["llama-dynamic"], tmp_path)
    decoder = load_model(tmp_path, torch.float32).decoder
    assert decoder.config.context_limit == 256
    ids = tokens(total)
    torch.testing.assert_close(run(decoder, ids, prompt), run_transformers(reference, ids, prompt), **TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "qwen2", "qwen3"])
@torch.inference_mode()
def test_requests_in_one_flat_batch_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    save_random(FAMILIES[family], tmp_path)
    decoder = load_model(tmp_path, torch.float32).decoder
    requests = [tokens(PROMPT + STEPS, 1), tokens(3 + STEPS, 2), tokens(1 + STEPS, 3)]
    prompts = [PROMPT, 3, 1]
    attend = DenseAttention(len(requests))
    got: list[list[Tensor]] = [[] for _ in requests]
    done = [0] * len(requests)
    for step in range(STEPS + 1):
        attend.lengths = prompts if step == 0 else [1] * len(requests)
        spans = [(a, a + n) for a, n in zip(done, attend.lengths)]
        flat = torch.cat([ids[a:b] for ids, (a, b) in zip(requests, spans)])
        positions = torch.cat([torch.arange(a, b) for a, b in spans])
        logits = decoder.logits(decoder(flat, positions, attend))
        for rows, part in zip(got, logits.split(list(attend.lengths))):
            rows.append(part)
        done = [b for _, b in spans]
    for rows, ids, prompt in zip(got, requests, prompts):
        torch.testing.assert_close(torch.cat(rows), run(decoder, ids, prompt), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_stays_near_float32(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_random(FAMILIES[family], tmp_path)
    ids = tokens(PROMPT)
    exact = run(load_model(tmp_path, torch.float32).decoder, ids, PROMPT)
    decoder = load_model(tmp_path, dtype).decoder
    rounded = run(decoder, ids, PROMPT)
    assert decoder.dtype is dtype
    assert rounded.dtype is torch.float32
    assert 0 < (rounded - exact).std() / exact.std() < 0.05


def test_rotation_keeps_norms_and_depends_on_distance_only() -> None:
    table = random_model(tiny()).rotary
    assert table.cos.dtype is torch.float32
    assert table.cos.shape == table.sin.shape == (64, 8)
    x, y = torch.randn(1, 3, 16), torch.randn(1, 3, 16)
    near = (table.rotate(x, torch.tensor([7])) * table.rotate(y, torch.tensor([2]))).sum(-1)
    far = (table.rotate(x, torch.tensor([55])) * table.rotate(y, torch.tensor([50]))).sum(-1)
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(table.rotate(x, torch.tensor([33])).norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(table.rotate(x, torch.tensor([33])), x)


def test_a_position_beyond_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        random_model(tiny()).rotary.rotate(torch.randn(1, 1, 16), torch.tensor([64]))


@torch.inference_mode()
def keys_before_rotation(decoder: Decoder, count: int) -> list[Tensor]:
    """Keys [T, H, D] of every layer at position 0, where the rotation is the identity."""
    keys: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys.append(k)
        return q

    decoder(torch.arange(count) % decoder.config.vocab_size, torch.zeros(count, dtype=torch.long), attend)
    return keys


@pytest.mark.parametrize("qk_norm", [False, True])
def test_key_spread_predicts_the_spread_of_keys(qk_norm: bool) -> None:
    config = tiny(vocab_size=2000, hidden_size=256, qk_norm=qk_norm)
    decoder = random_model(config, seed=1)
    decoder.layers[0].qkv.mul_(torch.linspace(0.2, 5, decoder.layers[0].qkv.shape[0])[:, None])
    measured = keys_before_rotation(decoder, 2000)[0].std(0)
    assert decoder.key_spread(0).shape == (2, 16)
    torch.testing.assert_close(decoder.key_spread(0), measured, rtol=0.25, atol=0)


def test_key_bias_is_the_mean_of_keys_where_there_is_one() -> None:
    decoder = random_model(tiny(vocab_size=2000, qkv_bias=True), seed=2)
    decoder.layers[0].qkv_bias.mul_(100)
    bias = decoder.key_bias(0)
    assert bias is not None
    assert bias.dtype is torch.float32
    torch.testing.assert_close(bias, keys_before_rotation(decoder, 2000)[0].mean(0), rtol=0, atol=0.3)
    assert random_model(tiny()).key_bias(0) is None
    assert random_model(tiny(qkv_bias=True, qk_norm=True)).key_bias(0) is None


def test_random_models_are_reproducible_and_seeds_differ() -> None:
    first, second, other = (random_model(tiny(), seed) for seed in (0, 0, 1))
    ids = tokens(PROMPT)
    assert torch.equal(run(first, ids, PROMPT), run(second, ids, PROMPT))
    assert not torch.allclose(run(first, ids, PROMPT), run(other, ids, PROMPT))


def test_moving_a_decoder_changes_its_dtype_but_not_its_tables() -> None:
    decoder = random_model(tiny())
    decoder.to(torch.bfloat16)
    assert decoder.dtype is torch.bfloat16
    assert decoder.layers[0].qkv.dtype is torch.bfloat16
    assert decoder.rotary.cos.dtype is torch.float32
    assert run(decoder, tokens(PROMPT), PROMPT).isfinite().all()


def test_no_tokens_give_no_hidden_states() -> None:
    decoder = random_model(tiny())
    nothing = torch.zeros(0, dtype=torch.long)
    assert decoder(nothing, nothing, lambda layer, q, k, v: q).shape == (0, 64)


def test_yarn_context_counts_the_extension() -> None:
    rope = RopeConfig(type="yarn", factor=4.0, original_max_position=64)
    assert rope.context_length(64) == rope.context_length(256) == 256
