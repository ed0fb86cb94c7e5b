"""Every kernel compiled for the CPU, on NumPy views of the cache's tensors; tested against the reference bodies.

What is no hot loop (`release`) is the reference body itself.
"""

from siftkv.kernels.numba.append import append_tokens
from siftkv.kernels.numba.attention import decode_attention
from siftkv.kernels.numba.batch import measure_prompts, store_prompts
from siftkv.kernels.numba.prompt import prompt_importance
from siftkv.kernels.numba.sift import sift_step
from siftkv.kernels.numba.window import write_window
from siftkv.kernels.reference import DEFERS_FAULTS, refused_layers, release

__all__ = [
    "DEFERS_FAULTS",
    "append_tokens",
    "decode_attention",
    "measure_prompts",
    "prompt_importance",
    "refused_layers",
    "release",
    "sift_step",
    "store_prompts",
    "write_window",
]
