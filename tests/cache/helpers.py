"""Policies of three kinds that share a pool."""

from __future__ import annotations

POLICIES = [
    "diffkv:window=8,sinks=2,alpha_high=1.5,alpha_low=0.7,interval=1,catch_up=1",
    "uniform:k8v4,window=5,sinks=0",
    "full:window=4",
]
