"""Where the time of a decode step goes, and how long one request takes from prompt to last token (the questions of
DiffKV's figures 14 and 15, arXiv 2412.03131), against this engine's own full cache.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.benchmarks.resident import Resident, graph_ms, resident
from siftkv.benchmarks.step import sift_ms
from siftkv.engine.llm import LLM
from siftkv.engine.sampling_params import SamplingParams
from siftkv.kernels.cuda.step import choose
from siftkv.models import LoadedModel

TOTAL = 4096
"""Tokens of a request, prompt and output."""

OUTPUT = 256
SETTINGS = ("full", "diffkv", f"fixed:high_share=0.1,low_share=0.66,length={TOTAL}")
BATCHES = (1, 16)


@dataclass(frozen=True)
class Split:
    """Milliseconds of a step and of its parts, each measured alone as a CUDA graph. Parts overlap in the step.

    projections: linear layers, norms, rotation, embedding and LM head. attention: writing the window, attending, and
    the refresh of scores where it is due. sift: classing, demoting and appending tokens, and pages. sampling: greedy.
    """

    kv: str
    batch: int
    step: float
    projections: float
    attention: float
    sift: float
    sampling: float


@dataclass(frozen=True)
class EndToEnd:
    """One request alone: seconds to the first token and to the last. physical: bytes at the end by bf16's."""

    kv: str
    prompt: int
    output: int
    first_token_s: float
    seconds: float
    physical: float


@torch.inference_mode()
def split_step(model: LoadedModel, kv: str, batch: int) -> Split:
    """The parts of one setting's step."""
    with resident(model, kv, batch, TOTAL, (4 << 30) + batch * (640 << 20)) as held:
        return Split(
            kv=kv,
            batch=batch,
            step=held.step_ms(),
            projections=_projections(model, held),
            attention=_attention(model, held),
            sift=sift_ms(held),
            sampling=_sampling(model, held),
        )


def _projections(model: LoadedModel, held: Resident) -> float:
    decoder, positions = model.decoder, held.llm.cache.state.seen[held.slots]

    def skip(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q

    return graph_ms(lambda: decoder.raw_logits(decoder(held.tokens, positions, skip)))


def _attention(model: LoadedModel, held: Resident) -> float:
    config, cache, batch = model.config, held.llm.cache, len(held.slots)
    shape = (batch, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
    qkv = torch.randn(shape, dtype=model.decoder.dtype, device=held.slots.device)
    q, k, v = qkv.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), 1)
    return graph_ms(lambda: [cache.attend(layer, held.slots, q, k, v) for layer in range(config.num_layers)])


def _sampling(model: LoadedModel, held: Resident) -> float:
    state, shape = held.llm.cache.state, (len(held.slots), model.config.vocab_size)
    logits = torch.randn(shape, dtype=model.decoder.dtype, device=held.slots.device)
    return graph_ms(lambda: [choose(logits, state.not_finite, held.slots, state.counters) for _ in range(20)]) / 20


def end_to_end(model: LoadedModel, kv: str) -> EndToEnd:
    """One greedy request of `TOTAL` tokens, alone; what compiles and captures ran before."""
    llm = LLM(model, kv, max_num_seqs=1, max_model_len=TOTAL + 1, kv_cache_memory_bytes=4 << 30)
    try:
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(1, model.config.vocab_size, (TOTAL - OUTPUT,), generator=generator).tolist()
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        begin = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
        times = []
        for chunk in llm.stream(prompt, params):
            times += [time.perf_counter() - begin] * len(chunk.token_ids)
            last = chunk
        assert last.output is not None
        report = last.output.kv
        assert report is not None
        return EndToEnd(kv, len(prompt), len(times), times[0], times[-1], report.ratio)
    finally:
        del llm
        gc.collect()
        torch.cuda.empty_cache()
