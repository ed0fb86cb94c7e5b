"""Speed and memory on a CPU as rows with bars, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from siftkv.benchmarks.cpu import TRANSFORMERS, Case, Speed
from siftkv.benchmarks.prompt_memory import PromptMemory
from siftkv.benchmarks.results import Row
from siftkv.policies import DiffKV, Full, parse_policy

PREFILL_BAR = 0.8
DECODE_BARS = {Full.name: 0.95, DiffKV.name: 0.8}
"""Tokens a second as a share of those of `transformers`, by policy."""


def against_transformers(speeds: Sequence[Speed], speed: Speed) -> tuple[float, float]:
    """Prefill and decode tokens a second, as multiples of those of `transformers` in the same case."""
    reference = next(s for s in speeds if s.engine == TRANSFORMERS and s.case == speed.case)
    return speed.prefill_tokens_s / reference.prefill_tokens_s, speed.decode_tokens_s / reference.decode_tokens_s


def rows(speeds: Sequence[Speed], memory: dict[str, PromptMemory]) -> list[Row]:
    """Each setting's two shares of `transformers`' speed in each case, how it held a prompt, then every figure."""
    found = []
    for speed in (s for s in speeds if s.engine != TRANSFORMERS):
        prefill, decode = against_transformers(speeds, speed)
        policy = parse_policy(speed.engine).name
        prefill_bar = f">= {PREFILL_BAR}" if policy in DECODE_BARS else None
        decode_bar = f">= {DECODE_BARS[policy]}" if policy in DECODE_BARS else None
        where = f"{speed.engine}, {_case(speed.case)}"
        found += [
            Row(what=f"{where}: decode", value=decode, unit="x transformers", bar=decode_bar),
            Row(what=f"{where}: prefill", value=prefill, unit="x transformers", bar=prefill_bar),
        ]
    for kv, traced in memory.items():
        where = f"{kv}, prompt of {traced.tokens}"
        found += [
            Row(what=f"{where}: layers held at full precision", value=traced.peak_layers, unit="layers", bar="<= 1"),
            Row(what=f"{where}: peak KV bytes", value=traced.peak_bytes / traced.bf16_bytes, unit="of bf16"),
        ]
    for speed in speeds:
        where = f"{speed.engine}, {_case(speed.case)}"
        found += [
            Row(what=f"{where}: decode speed", value=speed.decode_tokens_s, unit="tokens/s"),
            Row(what=f"{where}: prefill speed", value=speed.prefill_tokens_s, unit="tokens/s"),
            Row(what=f"{where}: median decode step", value=1000 * speed.step_s, unit="ms"),
            Row(what=f"{where}: KV bytes", value=speed.kv_bytes, unit="bytes"),
        ]
    return found


def _case(case: Case) -> str:
    return f"context {case.context}, batch {case.batch}"


def to_data(speeds: Sequence[Speed], memory: dict[str, PromptMemory], about: dict[str, Any]) -> dict[str, Any]:
    """What the results file keeps beside its rows: every run's times. about: how it was measured."""
    traced = {kv: asdict(m) | {"peak_bytes": m.peak_bytes} for kv, m in memory.items()}
    return about | {"speeds": [asdict(s) for s in speeds], "prompt_memory": traced}
