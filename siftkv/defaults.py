"""What is taken where nothing is said. No imports: the command line reads it before anything heavy is loaded."""

DEFAULT_KV = "uniform:k4v4"
"""The KV cache of `LLM` and of the commands.

Four bits for everything, nothing dropped: a third of the bytes at head_dim 64, 30 % at 128, the lowest KL of all
settings of that size, and on tasks not to be told from the full cache. Settings that drop tokens (`sift`, `diffkv`,
`hardkv`) go lower, but a token that is dropped and needed later is gone: that is chosen knowingly. See
docs/policies.md.
"""
