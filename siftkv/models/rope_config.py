"""The parameters of a model's rotary position embedding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from siftkv.errors import ModelError

SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Names and meanings are those of `rope_parameters` in a `transformers` config.

    `original_max_position` is the length in tokens of the pretraining that a scaled type extends; the scaled types need
    it. The fields after it belong to `llama3` (frequency factors) and to `yarn` (the rest, Peng et al., arXiv
    2309.00071) and stay None elsewhere.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.type not in SUPPORTED_ROPE_TYPES:
            raise ModelError(
                f"The RoPE type {self.type!r} is not supported. Supported: {', '.join(SUPPORTED_ROPE_TYPES)}. "
                "Choose a release of the model with one of these."
            )
        if self.type != "default" and self.original_max_position is None:
            raise ModelError(f"RoPE type {self.type!r} needs original_max_position_embeddings in config.json.")
        if self.type == "llama3" and None in (self.low_freq_factor, self.high_freq_factor):
            raise ModelError("RoPE type 'llama3' needs low_freq_factor and high_freq_factor in config.json.")

    def context_length(self, max_position_embeddings: int) -> int:
        """Tokens that the model is made for, given the `max_position_embeddings` of its config.

        Configs write the extended length for `llama3`, but the length before extension for `linear` and `dynamic`; for
        `yarn` both habits exist, so the longer one counts.
        """
        if self.type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.type == "yarn" and self.original_max_position is not None:
            return max(max_position_embeddings, int(self.original_max_position * self.factor))
        return max_position_embeddings

    def parameters(self) -> dict[str, Any]:
        """The `rope_parameters` dict that `transformers` computes frequencies from."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        values["rope_type"] = values.pop("type")
        values["rope_theta"] = values.pop("theta")
        if "original_max_position" in values:
            values["original_max_position_embeddings"] = values.pop("original_max_position")
        return values

    @classmethod
    def from_hf(cls, hf_config: Any) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (before); raises `ModelError`."""
        given = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
        if any(isinstance(value, dict) for value in given.values()):
            raise ModelError(
                "Layers with different RoPE parameters are not supported: choose a model whose layers all rotate alike."
            )
        partial = given.get("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
        if partial not in (None, 1, 1.0):
            raise ModelError(
                f"Partial rotary embeddings (partial_rotary_factor={partial}) are not supported, only full ones."
            )
        rope_type = given.get("rope_type") or given.get("type") or "default"
        theta = float(given.get("rope_theta") or getattr(hf_config, "rope_theta", None) or 10000.0)
        if rope_type == "default":
            return cls(theta=theta)
        length = hf_config.max_position_embeddings
        original = given.get("original_max_position_embeddings") or length
        if rope_type in ("linear", "dynamic"):
            original = length
        return cls(
            type=rope_type,
            theta=theta,
            factor=float(given.get("factor") or length / original),
            original_max_position=int(original),
            low_freq_factor=given.get("low_freq_factor"),
            high_freq_factor=given.get("high_freq_factor"),
            attention_factor=given.get("attention_factor"),
            beta_fast=given.get("beta_fast"),
            beta_slow=given.get("beta_slow"),
            mscale=given.get("mscale"),
            mscale_all_dim=given.get("mscale_all_dim"),
            truncate=given.get("truncate"),
        )
