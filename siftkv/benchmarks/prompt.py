"""What sifting adds to a prompt pass on a GPU, and how long a long prompt holds up requests that are decoding.

Shapes of models with random bf16 weights. The bare pass is the same model with the same attention that keeps nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor

from siftkv.attention.prefill import ragged_attention
from siftkv.benchmarks.resident import gpu_ms
from siftkv.benchmarks.throughput import LLAMA3_8B, random_llama
from siftkv.engine.llm import LLM
from siftkv.engine.sampling_params import SamplingParams
from siftkv.kernels.prompts import PromptBatch
from siftkv.models import LoadedModel, ModelConfig

LONGEST = 32768
RAGGED = tuple(700 + i * 7 % 16 * 40 for i in range(16))
"""Tokens of prompts that have little in common."""
CASES = (
    ((1024,) * 8, "fixed"),
    ((8192,), "diffkv"),
    ((8192,), "diffkv:sample=1"),
    ((8192,), "sift"),
    ((LONGEST,), "diffkv"),
    ((LONGEST,), "sift"),
)
"""Tokens of each prompt, and how they are kept."""
SMALLER = "Qwen2.5-1.5B"
SMALLER_SHAPE = ModelConfig("LlamaForCausalLM", 151936, 1536, 8960, 28, 12, 2, 128, 32768)
SMALLER_CASES = ((RAGGED, "full"), (RAGGED, "diffkv"), (RAGGED, "sift"), ((1024,), "sift"))
"""On a model whose pass is short, where launches and the host's waits count."""

STALL_KV, STALL_BATCH, STALL_CONTEXT = "diffkv", 16, 1024
_POOL = 16 << 30
_REPEATS = 3


@dataclass(frozen=True)
class PromptRow:
    """Milliseconds of a prompt pass: bare, and with importance, sifting and storing.

    fewest, tokens: of the shortest and the longest prompt.
    """

    kv: str
    prompts: int
    fewest: int
    tokens: int
    model: str
    bare_ms: float
    ms: float

    @property
    def what(self) -> str:
        """Policy, prompts, and the shape where it is not the usual one."""
        tokens = f"{self.tokens}" if self.fewest == self.tokens else f"{self.fewest} to {self.tokens}"
        return f"{self.kv}, {self.prompts} x {tokens} tokens" + f", {SMALLER}" * (self.model == SMALLER)

    @property
    def share(self) -> float:
        """What sifting takes of the pass."""
        return 1 - self.bare_ms / self.ms

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}


@dataclass(frozen=True)
class Stall:
    """Milliseconds between two tokens of running requests: usually, and across a long prompt's pass, which takes
    `prompt_ms` by itself.
    """

    kv: str
    batch: int
    tokens: int
    step_ms: float
    gap_ms: float
    prompt_ms: float

    @property
    def beyond(self) -> float:
        """The gap by the prompt pass and a step."""
        return self.gap_ms / (self.prompt_ms + self.step_ms)


def run_prompts() -> tuple[list[PromptRow], Stall]:
    """All figures. Raises SiftKVError where there is no CUDA device."""
    rows = measure_prompts(SMALLER, SMALLER_SHAPE, SMALLER_CASES)
    model = random_llama(replace(LLAMA3_8B, max_position=2 * LONGEST))
    rows = [_measure_prompt(model, "Llama-3-8B", *case) for case in CASES] + rows
    alone = next(row.ms for row in rows if (row.kv, row.tokens) == (STALL_KV, LONGEST))
    return rows, measure_stall(model, alone)


def measure_prompts(name: str, shape: ModelConfig, cases: Sequence[tuple[tuple[int, ...], str]]) -> list[PromptRow]:
    """Cases of one shape. Raises SiftKVError where there is no CUDA device."""
    model = random_llama(shape)
    return [_measure_prompt(model, name, *case) for case in cases]


def _measure_prompt(model: LoadedModel, name: str, lengths: tuple[int, ...], kv: str) -> PromptRow:
    """One case, median of some passes after one that compiles."""
    prompts = len(lengths)
    with _engine(model, kv, prompts, max(lengths) + 64) as llm:
        ids = [own[:length] for own, length in zip(_tokens(model, prompts, max(lengths)), lengths, strict=True)]
        policy, cache = llm.engine.bind(llm.kv), llm.cache

        def sifted() -> None:
            slots = [cache.admit(policy.rule) for _ in range(prompts)]
            _, failures = llm.engine.runner.prefill(ids, slots, [policy] * prompts)
            cache.release(slots)
            for failure in failures:
                if failure is not None:
                    raise failure

        bare, whole = (_median_ms(work) for work in (lambda: _bare(model, ids), sifted))
        return PromptRow(kv, prompts, min(lengths), max(lengths), name, bare, whole)


@torch.inference_mode()
def _bare(model: LoadedModel, prompts: list[list[int]]) -> None:
    device, count, lengths = model.decoder.device, len(prompts), [len(p) for p in prompts]
    batch = PromptBatch.of([0] * count, lengths, [(0, 0)] * count, [None] * count, device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ragged_attention(q, k, v, batch)[0]

    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    spread = torch.cat([torch.full((n,), n, device=device) for n in lengths])
    hidden = model.decoder(torch.tensor([*chain.from_iterable(prompts)], device=device), positions, attend, spread)
    model.decoder.logits(hidden[batch.bounds[1:] - 1])


def measure_stall(model: LoadedModel, prompt_ms: float) -> Stall:
    """Requests decode; then a long prompt comes. Graphs are captured before, as a server does at its start."""
    with _engine(model, STALL_KV, STALL_BATCH + 1, LONGEST + 256) as llm:
        engine = llm.engine
        if engine.runner.graphs is not None:
            engine.runner.graphs.capture_all()
        running = {
            engine.add(ids, SamplingParams(temperature=0, max_tokens=160, ignore_eos=True), llm.kv)
            for ids in _tokens(model, STALL_BATCH, STALL_CONTEXT)
        }
        times = [_step_ms(llm, running) for _ in range(96)]
        engine.add(_tokens(model, 1, LONGEST)[0], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), llm.kv)
        gap = max(_step_ms(llm, running) for _ in range(32))
        return Stall(STALL_KV, STALL_BATCH, LONGEST, median(times[32:]), gap, prompt_ms)


def _step_ms(llm: LLM, running: set[str]) -> float:
    """Until the next tokens of running requests are known on the host."""
    begin = time.perf_counter()
    while not any(chunk.token_ids for chunk in llm.engine.step() if chunk.request_id in running):
        pass
    return (time.perf_counter() - begin) * 1e3


@contextmanager
def _engine(model: LoadedModel, kv: str, slots: int, max_len: int) -> Iterator[LLM]:
    llm = LLM(model, kv, max_num_seqs=slots, max_model_len=max_len, kv_cache_memory_bytes=_POOL)
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def _tokens(model: LoadedModel, prompts: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    found: list[list[int]] = torch.randint(1, model.config.vocab_size, (prompts, length), generator=generator).tolist()
    return found


def _median_ms(work: Any) -> float:
    work()
    return median(gpu_ms(work) for _ in range(_REPEATS))
