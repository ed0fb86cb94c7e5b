"""What loads, and what a model that does not load says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from siftkv.errors import ModelError
from siftkv.models import ModelConfig, load_model
from tests.models_helpers import FAMILIES, VOCAB, save_random

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama, ready to be damaged."""
    path = tmp_path / "tiny-llama"
    save_random(FAMILIES["llama"], path)
    return path


def hidden(folder: Path) -> Tensor:
    decoder = load_model(folder, torch.float32).decoder
    return decoder(torch.arange(9), torch.arange(9), lambda layer, q, k, v: q * k.mean(1, keepdim=True))


def edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def edit_weights(folder: Path, **changes: Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def refused(folder: Path | str, *parts: str) -> None:
    """Loading fails, and the message holds every one of `parts`."""
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    for part in parts:
        assert part in str(caught.value)


def test_a_folder_gives_everything_a_caller_needs(folder: Path) -> None:
    model = load_model(str(folder))
    assert model.name == "tiny-llama"
    assert model.decoder.dtype is torch.float32
    assert model.config is model.decoder.config
    assert model.config.eos_token_ids == (2,)
    assert model.config.context_limit == 64
    assert model.tokenizer.encode("w5 w6", add_special_tokens=False) == [5, 6]
    assert model.generation == {}
    assert not any(weight.requires_grad for weight in model.decoder.parameters())


def test_auto_takes_the_dtype_of_the_checkpoint(folder: Path) -> None:
    edit_json(folder / "config.json", dtype="bfloat16")
    assert load_model(folder).decoder.dtype is torch.bfloat16
    assert load_model(folder, "float16").decoder.dtype is torch.float16
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder).decoder.dtype is torch.float32


def test_generation_config_gives_sampling_and_ends_of_text(folder: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 7], "max_length": 40}
    edit_json(folder / "generation_config.json", **settings)
    model = load_model(folder)
    assert model.generation == {"temperature": 0.6, "top_p": 0.9}
    assert model.config.eos_token_ids == (2, 7)


def test_shards_equal_one_file(folder: Path, tmp_path: Path) -> None:
    save_random(FAMILIES["llama"], tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    torch.testing.assert_close(hidden(tmp_path / "sharded"), hidden(folder))


def test_fused_checkpoints_equal_separate_ones(tmp_path: Path) -> None:
    save_random(FAMILIES["llama-biases"], tmp_path)
    expected = hidden(tmp_path)
    changes: dict[str, Tensor | None] = {}
    tensors = load_file(tmp_path / WEIGHTS)
    fused = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    for layer in range(2):
        for target, parts in fused.items():
            for kind in ("weight", "bias"):
                block = target.split(".")[0]
                names = [f"model.layers.{layer}.{block}.{part}.{kind}" for part in parts]
                changes[f"model.layers.{layer}.{target}.{kind}"] = torch.cat([tensors[name] for name in names])
                changes |= dict.fromkeys(names)
    edit_weights(tmp_path, **changes)
    assert torch.equal(hidden(tmp_path), expected)
    edit_weights(tmp_path, **{"model.layers.0.self_attn.k_proj.bias": tensors["model.layers.0.self_attn.k_proj.bias"]})
    refused(tmp_path, "model.layers.0.self_attn.", "twice")


def test_a_base_model_without_prefix_loads_when_tied(tmp_path: Path) -> None:
    save_random(FAMILIES["llama-tied"], tmp_path)
    expected = hidden(tmp_path)
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()},
        tmp_path / WEIGHTS,
    )
    assert torch.equal(hidden(tmp_path), expected)


def test_a_tied_head_may_be_stored_once_under_either_name_or_twice(tmp_path: Path) -> None:
    save_random(FAMILIES["llama-tied"], tmp_path)
    expected = hidden(tmp_path)
    embedding = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    edit_weights(tmp_path, **{"lm_head.weight": embedding.clone()})
    assert torch.equal(hidden(tmp_path), expected)
    edit_weights(tmp_path, **{"model.embed_tokens.weight": None})
    assert torch.equal(hidden(tmp_path), expected)
    edit_weights(tmp_path, **{"model.embed_tokens.weight": embedding + 1})
    refused(tmp_path, "tie_word_embeddings")


def test_old_rotary_buffers_are_passed_over(folder: Path) -> None:
    expected = hidden(folder)
    edit_weights(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(hidden(folder), expected)


def test_tensors_must_be_exactly_those_of_the_config(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(folder / WEIGHTS)[name]
    edit_weights(folder, **{name: None})
    refused(folder, str(folder), name, "Download it again")
    edit_weights(folder, **{name: weight[:-1].contiguous()})
    refused(folder, WEIGHTS, name, "[47, 32]", "[48, 32]")
    edit_weights(folder, **{name: weight.to(torch.int8)})
    refused(folder, name, "quantised")
    edit_weights(folder, **{name: weight.to(torch.float8_e4m3fn)})
    refused(folder, name, "quantised")
    edit_weights(folder, **{name: weight, "model.layers.1.mlp.experts.weight": weight.clone()})
    refused(folder, WEIGHTS, "model.layers.1.mlp.experts.weight")


def test_damaged_weights_name_the_file(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])
    refused(folder, str(folder / WEIGHTS), "damaged or cut short", "Download it again")
    (folder / WEIGHTS).write_bytes(b"\xff" * 64 + content[64:])
    refused(folder, str(folder / WEIGHTS), "damaged or cut short")
    (folder / WEIGHTS).write_bytes(b"")
    refused(folder, str(folder / WEIGHTS), "damaged or cut short")
    (folder / WEIGHTS).unlink()
    refused(folder, str(folder), "no safetensors weights", "convert")


def test_incomplete_shards_are_refused(tmp_path: Path) -> None:
    save_random(FAMILIES["llama"], tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = index.read_text()
    index.write_text(content[:50])
    refused(tmp_path, str(index), "cannot be read")
    index.write_text("{}")
    refused(tmp_path, str(index), "lists no files")
    index.unlink()
    refused(tmp_path, "several safetensors files", "index.json")
    index.write_text(content)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, str(shard), "missing")


def test_missing_and_damaged_configs(folder: Path, tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "no config.json")
    (folder / "config.json").write_text("{")
    refused(folder, str(folder / "config.json"), "cannot be read")
    (folder / "config.json").write_text('{"model_type": "never-heard-of"}')
    refused(folder, "never-heard-of", "LlamaForCausalLM")


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused(folder, str(folder), "no usable tokenizer", "tokenizer.json")


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", vocab_size=VOCAB - 1)
    refused(folder, "tokenizer", str(VOCAB), str(VOCAB - 1))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "longrope"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_what_cannot_run_exactly_is_refused(folder: Path, changes: dict[str, object], part: str) -> None:
    config = LlamaConfig(**(FAMILIES["llama"].to_dict()))
    config.architectures = ["LlamaForCausalLM"]
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ModelError, match=part):
        ModelConfig.from_hf(config)


def test_an_unsupported_architecture_lists_what_is_supported(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["MixtralForCausalLM"], model_type="mixtral")
    refused(folder, "MixtralForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "Choose")


def test_sliding_windows_limit_the_context() -> None:
    windowed = ModelConfig.from_hf(MistralConfig(sliding_window=4096, max_position_embeddings=32768))
    assert (windowed.sliding_window, windowed.context_limit) == (4096, 4096)
    plain = ModelConfig.from_hf(MistralConfig(sliding_window=None, max_position_embeddings=32768))
    assert (plain.sliding_window, plain.context_limit) == (None, 32768)
    unused = ModelConfig.from_hf(Qwen2Config(use_sliding_window=False, sliding_window=4096))
    assert (unused.sliding_window, unused.context_limit) == (None, 32768)
    every = Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=0)
    assert ModelConfig.from_hf(every).context_limit == 4096
    beyond = Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=32)
    assert ModelConfig.from_hf(beyond).context_limit == 32768
    with pytest.raises(ModelError, match="different kinds of attention"):
        ModelConfig.from_hf(Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=16))


def test_rope_is_read_in_its_old_and_its_new_shape() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    new = LlamaConfig(
        max_position_embeddings=131072, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    )

    class Old:
        rope_parameters = None
        rope_scaling: ClassVar = {"type": "llama3", **scaling}
        rope_theta = 5e5

        def __getattr__(self, name: str) -> object:
            return getattr(new, name)

    assert ModelConfig.from_hf(Old()).rope == ModelConfig.from_hf(new).rope
    assert ModelConfig.from_hf(new).rope.type == "llama3"
    assert ModelConfig.from_hf(new).max_position == 131072


def test_a_name_that_is_nothing_says_what_a_name_can_be() -> None:
    refused("no-such-model", "no-such-model", "smollm2-135m", "owner/model", ".gguf")


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: object, **options: object) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    refused("someone/some-model", "someone/some-model", "Name or service not known", "HF_HUB_OFFLINE", "HF_TOKEN")


def test_a_hub_id_loads_the_folder_that_the_hub_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def give(name: str, **options: object) -> str:
        asked.append(name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    assert load_model("someone/tiny-llama").name == "someone/tiny-llama"
    assert asked == ["someone/tiny-llama"]


def test_dtypes_and_devices_that_do_not_exist(folder: Path) -> None:
    for dtype in ("int8", "float64", "nonsense"):
        with pytest.raises(ModelError, match="dtype"):
            load_model(folder, dtype)
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="CUDA"):
            load_model(folder, device="cuda")
    for device in ("tpu", "meta", "mps", "cuda:x", ""):
        with pytest.raises(ModelError, match="use cpu, cuda or cuda:N"):
            load_model(folder, device=device)
