"""`hardkv`: a cascade of dense, sparse and condensed tokens, chosen by votes of a request's own queries."""

from siftkv.policies.hardkv.policy import HardKV

__all__ = ["HardKV"]
