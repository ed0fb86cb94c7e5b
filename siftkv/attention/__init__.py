"""Attention over the cache. It asks kernels and the cache, and knows no policy."""

from siftkv.attention.decode import DecodeAttention
from siftkv.attention.groups import PromptChunk
from siftkv.attention.prefill import PrefillAttention, causal_attention

__all__ = ["DecodeAttention", "PrefillAttention", "PromptChunk", "causal_attention"]
