"""Kernels for NVIDIA GPUs of compute capability 8.0 and later: CUDA C++, compiled for each cache at first use."""

from siftkv.kernels.cuda.append import append_tokens, refused_layers, store_prompts, write_window
from siftkv.kernels.cuda.attention import decode_attention
from siftkv.kernels.cuda.importance import measure_prompts, prompt_importance
from siftkv.kernels.cuda.pages import release
from siftkv.kernels.cuda.rewrite import rewrite
from siftkv.kernels.cuda.select import select, selects
from siftkv.kernels.cuda.sift import sift_step
from siftkv.kernels.cuda.snapshot import snapshot
from siftkv.kernels.cuda.worth import rank_prompts

DEFERS_FAULTS = True

__all__ = [
    "DEFERS_FAULTS",
    "append_tokens",
    "decode_attention",
    "measure_prompts",
    "prompt_importance",
    "rank_prompts",
    "refused_layers",
    "release",
    "rewrite",
    "select",
    "selects",
    "sift_step",
    "snapshot",
    "store_prompts",
    "write_window",
]
