"""SiftKV: LLM serving with a sifted KV cache.

from siftkv import LLM, SamplingParams, DiffKV

llm = LLM("smollm2-135m", kv=DiffKV(alpha_high=1.0, alpha_low=0.02))
out = llm.generate(["..."], SamplingParams(max_tokens=256))
out[0].text, out[0].kv.physical_bytes, out[0].kv.ratio
"""

from siftkv.engine.llm import LLM
from siftkv.engine.outputs import CompletionOutput, KVReport, RequestOutput, StreamChunk
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import SiftKVError
from siftkv.policies import DiffKV, Full, Policy, Uniform, parse_policy

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "DiffKV",
    "Full",
    "KVReport",
    "Policy",
    "RequestOutput",
    "SamplingParams",
    "SiftKVError",
    "StreamChunk",
    "Uniform",
    "parse_policy",
]
