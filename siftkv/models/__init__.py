"""Models: one decoder for the Llama family, its configuration, and where weights come from."""

from siftkv.models.config import SUPPORTED_ARCHITECTURES, ModelConfig
from siftkv.models.decoder import Attend, Decoder
from siftkv.models.dummy import dummy_model
from siftkv.models.loading import LoadedModel, load_model
from siftkv.models.random_weights import random_model
from siftkv.models.registry import BuiltinModel, list_models, model_path, pull
from siftkv.models.rope import RotaryTable
from siftkv.models.rope_config import SUPPORTED_ROPE_TYPES, RopeConfig

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "SUPPORTED_ROPE_TYPES",
    "Attend",
    "BuiltinModel",
    "Decoder",
    "LoadedModel",
    "ModelConfig",
    "RopeConfig",
    "RotaryTable",
    "dummy_model",
    "list_models",
    "load_model",
    "model_path",
    "pull",
    "random_model",
]
