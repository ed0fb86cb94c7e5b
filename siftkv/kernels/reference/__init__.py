"""Every kernel in plain PyTorch: runs anywhere, vectorised over requests, layers and heads, and is what the fast bodies
are tested against.
"""

from siftkv.kernels.reference.attention import decode_attention
from siftkv.kernels.reference.pages import DEFERS_FAULTS, refused_layers, release
from siftkv.kernels.reference.prompt import (
    append_tokens,
    measure_prompts,
    prompt_importance,
    store_prompts,
    write_window,
)
from siftkv.kernels.reference.sift import sift_step

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
