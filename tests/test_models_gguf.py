"""GGUF files: read through `transformers`, with the RoPE scaling that it passes over."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from siftkv.errors import ModelError
from siftkv.models import ModelConfig, RopeConfig, load_model
from siftkv.models.rope import llama3_factors
from tests.models_helpers import FAMILIES, VOCAB, save_random

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
HEADS = {"attn_q": 4, "attn_k": 2}


def gguf_name(name: str) -> str:
    layer = name.removeprefix("model.layers.")
    if layer == name:
        return f"{NAMES[name.removesuffix('.weight')]}.weight"
    index, rest = layer.split(".", 1)
    return f"blk.{index}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(path: Path, model: torch.nn.Module, scaling: dict[str, object], factors: torch.Tensor | None) -> None:
    """A float32 GGUF file of a small Llama, with q and k in the interleaved order that the format has."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(VOCAB)
    for key, value in scaling.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"llama.rope.scaling.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(VOCAB - 5)), "ab", "cd"])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, weight in model.state_dict().items():
        target, array = gguf_name(name), weight.numpy()
        heads = HEADS.get(target.split(".")[-2])
        if heads is not None:
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(target, np.ascontiguousarray(array))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def llama(tmp_path: Path) -> torch.nn.Module:
    return save_random(FAMILIES["llama"], tmp_path / "folder")


def rope_config(rope: RopeConfig, max_position: int = 131072) -> ModelConfig:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return ModelConfig("LlamaForCausalLM", VOCAB, **shape, head_dim=8, max_position=max_position, rope=rope)


def test_a_file_equals_the_folder_that_it_came_from(llama: torch.nn.Module, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", llama, {}, None)
    model = load_model(tmp_path / "tiny.gguf", torch.float32)
    folder = load_model(tmp_path / "folder", torch.float32)
    assert model.name == "tiny"
    assert model.config.rope == folder.config.rope
    for mine, theirs in zip(model.decoder.parameters(), folder.decoder.parameters()):
        assert torch.equal(mine, theirs)
    assert load_model(tmp_path / "tiny.gguf").decoder.dtype is torch.bfloat16
    assert model.config.eos_token_ids == (2,)
    assert (model.tokenizer.bos_token, model.tokenizer.eos_token) == ("<s>", "</s>")


def test_linear_and_yarn_scaling_is_kept(llama: torch.nn.Module, tmp_path: Path) -> None:
    write_gguf(tmp_path / "linear.gguf", llama, {"type": "linear", "factor": 4.0}, None)
    rope = load_model(tmp_path / "linear.gguf").config.rope
    assert (rope.type, rope.factor, rope.theta) == ("linear", 4.0, 500.0)
    write_gguf(tmp_path / "yarn.gguf", llama, {"type": "yarn", "factor": 2.0}, None)
    rope = load_model(tmp_path / "yarn.gguf").config.rope
    assert (rope.type, rope.factor, rope.original_max_position) == ("yarn", 2.0, 32)
    write_gguf(tmp_path / "odd.gguf", llama, {"type": "longrope", "factor": 2.0}, None)
    with pytest.raises(ModelError, match="longrope"):
        load_model(tmp_path / "odd.gguf")


def test_the_frequency_factors_of_llama3_are_recognised(llama: torch.nn.Module, tmp_path: Path) -> None:
    # With a small theta all wavelengths are short and all factors 1, which would say nothing: take that of Llama 3.
    llama.config.rope_parameters["rope_theta"] = 500000.0
    rope = RopeConfig("llama3", 500000.0, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    factors = llama3_factors(rope_config(rope))
    assert factors.max() == 32
    assert factors.min() == 1
    write_gguf(tmp_path / "llama3.gguf", llama, {}, factors)
    assert load_model(tmp_path / "llama3.gguf").config.rope == rope
    write_gguf(tmp_path / "other.gguf", llama, {}, factors.flip(0))
    with pytest.raises(ModelError, match="not those of Llama 3"):
        load_model(tmp_path / "other.gguf")


def test_missing_and_damaged_files(llama: torch.nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no GGUF file at"):
        load_model(tmp_path / "none.gguf")
    write_gguf(tmp_path / "whole.gguf", llama, {}, None)
    content = (tmp_path / "whole.gguf").read_bytes()
    for name, part in {"short": content[:-5000], "header": content[:300], "noise": b"noise" * 100}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(part)
        with pytest.raises(ModelError, match=rf"{name}\.gguf"):
            load_model(path)
