"""SiftKV: LLM serving with a sifted KV cache.

from siftkv import LLM, SamplingParams, DiffKV

llm = LLM("smollm2-135m", kv=DiffKV(alpha_high=1.0, alpha_low=0.02))
out = llm.generate(["..."], SamplingParams(max_tokens=256))
out[0].text, out[0].kv.physical_bytes, out[0].kv.ratio
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from siftkv.engine.llm import LLM
    from siftkv.engine.outputs import CompletionOutput, KVReport, RequestOutput, StreamChunk
    from siftkv.engine.sampling_params import SamplingParams
    from siftkv.errors import SiftKVError
    from siftkv.policies import DiffKV, Full, HardKV, Policy, Sift, Uniform, parse_policy

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "DiffKV",
    "Full",
    "HardKV",
    "KVReport",
    "Policy",
    "RequestOutput",
    "SamplingParams",
    "Sift",
    "SiftKVError",
    "StreamChunk",
    "Uniform",
    "parse_policy",
]

_OUTPUTS = ("CompletionOutput", "KVReport", "RequestOutput", "StreamChunk")
_POLICIES = ("DiffKV", "Full", "HardKV", "Policy", "Sift", "Uniform", "parse_policy")
_HOMES = {
    "LLM": "siftkv.engine.llm",
    **dict.fromkeys(_OUTPUTS, "siftkv.engine.outputs"),
    "SamplingParams": "siftkv.engine.sampling_params",
    "SiftKVError": "siftkv.errors",
    **dict.fromkeys(_POLICIES, "siftkv.policies"),
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: help is printed, and the environment set, before torch is loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
