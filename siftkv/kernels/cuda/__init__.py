"""Kernels for NVIDIA GPUs of compute capability 9.0 and later: CUDA C++, compiled for each cache at first use."""

from siftkv.kernels.cuda.attention import decode_attention
from siftkv.kernels.cuda.pages import release
from siftkv.kernels.cuda.prompt import append_tokens, prompt_importance, refused_layers, write_window
from siftkv.kernels.cuda.sift import sift_step

DEFERS_FAULTS = True

__all__ = [
    "DEFERS_FAULTS",
    "append_tokens",
    "decode_attention",
    "prompt_importance",
    "refused_layers",
    "release",
    "sift_step",
    "write_window",
]
