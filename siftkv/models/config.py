"""What the decoder needs to know about a model, checked once, so that nothing later has to guess.

Anything that the decoder cannot run exactly is refused here with a `ModelError`: a model that answers, but wrongly, is
worse than one that does not load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from siftkv.errors import ModelError
from siftkv.models.rope_config import RopeConfig

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_BY_MODEL_TYPE = dict(zip(("llama", "mistral", "qwen2", "qwen3"), SUPPORTED_ARCHITECTURES))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and arithmetic of one decoder-only model.

    `max_position` is the length that the model was made for, in tokens, context extension by RoPE scaling included.
    `sliding_window` is the number of latest tokens that every layer attends to, or None where layers attend to
    everything. The decoder itself attends to everything that it is given, so a model with a window is exact only up to
    that length: see `context_limit`. `eos_token_ids` are all ids that end a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads evenly: "
                "check num_attention_heads and num_key_value_heads in config.json."
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary embeddings, not {self.head_dim}: check config.json.")

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def context_limit(self) -> int:
        """Most tokens (prompt and answer) that one request may hold: `min(max_position, sliding_window or infinity)`.

        Within a sliding window of n tokens the first n tokens see each other fully, so up to this length full attention
        and windowed attention are the same function. Beyond it they are not, and a caller must refuse a longer
        `max_model_len`.
        """
        return self.max_position if self.sliding_window is None else min(self.max_position, self.sliding_window)

    @classmethod
    def from_hf(cls, hf_config: Any) -> ModelConfig:
        """Read a `transformers` config object.

        Raises `ModelError` for anything that the decoder would not run exactly: another architecture, quantised
        weights, an unknown RoPE type or activation, partial rotary embeddings, or layers with different kinds of
        attention.
        """
        architecture = _architecture(hf_config)
        _refuse_quantised(hf_config)
        hidden_act = "silu" if hf_config.hidden_act == "swish" else hf_config.hidden_act
        if hidden_act != "silu":
            raise ModelError(
                f"The activation {hidden_act!r} is not supported, only 'silu': use a model with SwiGLU layers."
            )
        attention_bias = bool(getattr(hf_config, "attention_bias", False))
        num_heads = hf_config.num_attention_heads
        rope = RopeConfig.from_hf(hf_config)
        return cls(
            architecture=architecture,
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=getattr(hf_config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads,
            max_position=rope.context_length(hf_config.max_position_embeddings),
            rms_norm_eps=hf_config.rms_norm_eps,
            rope=rope,
            tie_embeddings=bool(getattr(hf_config, "tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
            mlp_bias=bool(getattr(hf_config, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_sliding_window(hf_config),
            eos_token_ids=token_ids(getattr(hf_config, "eos_token_id", None)),
            bos_token_id=getattr(hf_config, "bos_token_id", None),
            hidden_act=hidden_act,
        )


def token_ids(*values: int | Iterable[int] | None) -> tuple[int, ...]:
    """Distinct ids in order, from any mix of None, single ids and lists of ids, as config files hold them."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(value)
    return tuple(sorted(found))


def _architecture(hf_config: Any) -> str:
    names = getattr(hf_config, "architectures", None) or [_BY_MODEL_TYPE.get(getattr(hf_config, "model_type", ""))]
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = names[0] or getattr(hf_config, "model_type", None) or "unknown"
    raise ModelError(
        f"The architecture {found} is not supported. Supported: {', '.join(SUPPORTED_ARCHITECTURES)} "
        "(Llama 2 and 3, SmolLM2, Mistral, Qwen2 and 2.5, Qwen3; no mixture of experts). Choose one of these."
    )


def _refuse_quantised(hf_config: Any) -> None:
    quantisation = getattr(hf_config, "quantization_config", None)
    if quantisation is None:
        return
    values = quantisation if isinstance(quantisation, dict) else vars(quantisation)
    method = values.get("quant_method", "unknown")
    method = getattr(method, "value", method)
    raise ModelError(
        f"The weights are quantised ({method}), which is not supported: use the 16-bit release of this model, or a "
        "GGUF file of it (GGUF weights are dequantised when they are loaded). The KV cache is compressed either way."
    )


def _sliding_window(hf_config: Any) -> int | None:
    window = getattr(hf_config, "sliding_window", None)
    if getattr(hf_config, "use_sliding_window", True) is False:
        window = None
    kinds = set(getattr(hf_config, "layer_types", None) or ())
    if not kinds:
        return window
    if kinds == {"full_attention"}:
        return None
    if kinds == {"sliding_attention"} and window is not None:
        return int(window)
    raise ModelError(
        f"The layers of this model use different kinds of attention ({', '.join(sorted(kinds))}), which is not "
        "supported: choose a model whose layers all attend alike."
    )
