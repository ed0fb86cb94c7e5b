"""Which tensor of a checkpoint goes where in a `Decoder`, checked strictly: nothing missing, nothing left over, every
shape right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.errors import ModelError
from siftkv.models.config import ModelConfig
from siftkv.models.decoder import Decoder
from siftkv.models.layer import DecoderLayer

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one named tensor goes. `shape` is the checkpoint's; `parts` are the names that it stands for."""

    target: Tensor
    shape: tuple[int, ...]
    parts: tuple[str, ...]


class WeightFiller:
    """Copies the tensors of a checkpoint into a decoder, converting dtype and device on the way.

    Accepts separate projections as well as fused ones (`qkv_proj`, `gate_up_proj`), names with or without the prefix
    `model.`, and a tied head that is stored once or twice.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._tied = decoder.config.tie_embeddings
        self._places = dict(_places(decoder))
        self._missing = {part for place in self._places.values() for part in place.parts}

    def put(self, name: str, tensor: Tensor, source: str) -> None:
        """Copy one tensor. `source` is the file that a `ModelError` names."""
        if name.endswith("rotary_emb.inv_freq"):
            return  # old checkpoints carry this table, which follows from the config
        known = name if name in self._places else f"model.{name}"
        if self._tied and name == HEAD:
            known = EMBEDDING
        place = self._places.get(known)
        if place is None:
            raise ModelError(
                f"{source} has a tensor that config.json does not account for: {name}. The two do not belong together."
            )
        if tuple(tensor.shape) != place.shape:
            raise ModelError(
                f"{source}: {name} has shape {list(tensor.shape)}, but config.json asks for {list(place.shape)}. "
                "The two do not belong together."
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelError(
                f"{source}: {name} is stored as {tensor.dtype}, and quantised weights are not supported: use the "
                "16-bit release."
            )
        if not self._missing.issuperset(place.parts):
            self._check_repeated(known, name, tensor, place, source)
            return
        place.target.copy_(tensor)
        self._missing.difference_update(place.parts)

    def finish(self, source: str) -> None:
        """Raise `ModelError` if any weight was not given."""
        if self._missing:
            names = sorted(self._missing)
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ModelError(f"{source} lacks {shown}: the checkpoint is incomplete. Download it again.")

    def _check_repeated(self, known: str, name: str, tensor: Tensor, place: _Place, source: str) -> None:
        if known != EMBEDDING or not self._tied:
            raise ModelError(
                f"{source} has {name} twice, fused and separate: the checkpoint is damaged. Download it again."
            )
        if not torch.equal(place.target, tensor.to(place.target)):
            raise ModelError(
                f"{source}: {HEAD} and {EMBEDDING} differ, though config.json says that they are tied. "
                "Set tie_word_embeddings to false in config.json."
            )


def _places(decoder: Decoder) -> Iterator[tuple[str, _Place]]:
    yield _whole(EMBEDDING, decoder.embedding)
    yield _whole("model.norm.weight", decoder.final_norm)
    if not decoder.config.tie_embeddings:
        yield _whole(HEAD, decoder.head)
    for index, layer in enumerate(decoder.layers):
        yield from _layer_places(f"model.layers.{index}.", layer, decoder.config)


def _layer_places(prefix: str, layer: DecoderLayer, config: ModelConfig) -> Iterator[tuple[str, _Place]]:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    yield _whole(f"{prefix}input_layernorm.weight", layer.input_norm)
    yield _whole(f"{prefix}post_attention_layernorm.weight", layer.mlp_norm)
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    for kind, qkv, gate_up in (("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)):
        if qkv is not None:
            yield from _fused(attention, "qkv_proj", rows, kind, qkv)
        if gate_up is not None:
            yield from _fused(mlp, "gate_up_proj", {"gate_proj": inner, "up_proj": inner}, kind, gate_up)
    yield _whole(f"{attention}o_proj.weight", layer.o)
    yield _whole(f"{mlp}down_proj.weight", layer.down)
    if layer.o_bias is not None:
        yield _whole(f"{attention}o_proj.bias", layer.o_bias)
    if layer.down_bias is not None:
        yield _whole(f"{mlp}down_proj.bias", layer.down_bias)
    if layer.qk_norm is not None:
        heads = {"q_norm": layer.qk_norm[: config.num_heads], "k_norm": layer.qk_norm[config.num_heads :]}
        for norm, target in heads.items():  # one vector for all heads, repeated
            name = f"{attention}{norm}.weight"
            yield name, _Place(target, (config.head_dim,), (name,))


def _whole(name: str, target: Tensor) -> tuple[str, _Place]:
    return name, _Place(target, tuple(target.shape), (name,))


def _fused(prefix: str, fused: str, rows: dict[str, int], kind: str, target: Tensor) -> Iterator[tuple[str, _Place]]:
    """The parts of a fused matrix or bias one by one, and the whole under its own name."""
    names = tuple(f"{prefix}{part}.{kind}" for part in rows)
    for name, part in zip(names, torch.split(target, list(rows.values()))):
        yield _whole(name, part)
    yield f"{prefix}{fused}.{kind}", _Place(target, tuple(target.shape), names)
