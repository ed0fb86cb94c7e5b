"""Requests that stand in a cache on a GPU while their decode steps are measured."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from siftkv.engine.graphs import DecodeGraphs
from siftkv.engine.llm import LLM
from siftkv.errors import SiftKVError
from siftkv.models import LoadedModel

_WARM_UP, _STEPS = 3, 24
_BATCH_TOKENS = 8192
_SLACK = 192
"""Tokens that a request may grow by while it is measured."""


@dataclass(frozen=True)
class Resident:
    """An engine and the requests in its cache: slots and their next tokens, int64 `[B]` on the device."""

    llm: LLM
    slots: Tensor
    tokens: Tensor

    @property
    def graphs(self) -> DecodeGraphs:
        graphs = self.llm.engine.runner.graphs
        if graphs is None:
            raise SiftKVError("this benchmark measures CUDA graphs: it needs a GPU of compute capability 8.0 or later")
        return graphs

    def step(self) -> None:
        """Launch one step. Nothing waits for it."""
        self.graphs.launch(self.tokens, self.slots)

    @torch.inference_mode()
    def step_ms(self, steps: int = _STEPS) -> float:
        """Mean milliseconds of successive steps."""
        for _ in range(_WARM_UP):
            self.step()

        def run() -> None:
            for _ in range(steps):
                self.step()

        return gpu_ms(run) / steps

    @torch.inference_mode()
    def host_us(self, steps: int = _STEPS) -> float:
        """Median microseconds that the host takes to launch a replayed step."""
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        return median(times) * 1e6

    @torch.inference_mode()
    def launches(self) -> int:
        """Kernels of a replayed step."""
        self.step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.step()
            torch.cuda.synchronize()
        names = [event.name for event in found.events() if event.device_type.name == "CUDA"]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in names)

    def kv_bytes(self) -> int:
        """Bytes of keys and values that the attention of one step must read: codes, metadata and window rows."""
        state, spec = self.llm.cache.state, self.llm.cache.spec
        window = state.seen[self.slots] - state.window_start[self.slots] + state.sinks[self.slots]
        total = int(window.sum()) * spec.head_slots * 4 * spec.head_dim
        for tier, layout in enumerate(state.layouts):
            fmt = layout.format
            metadata = 0 if fmt.dense else fmt.key_meta_bytes + fmt.value_meta_bytes
            tokens = int(state.lengths[self.slots, ..., tier].sum())
            total += tokens * (layout.key_row + layout.value_row + metadata)
        return total

    def ratio(self) -> float:
        """Physical bytes by bf16's, mean over requests."""
        cache = self.llm.cache
        seen = int(cache.state.seen[self.slots[0]])
        return float(cache.request_bytes(self.slots).float().mean()) / cache.spec.bf16_bytes(seen)


def gpu_ms(work: Callable[[], object]) -> float:
    """Milliseconds on the device from the first to the last operation that `work` launches."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def graph_ms(work: Callable[[], object], replays: int = 5) -> float:
    """Median milliseconds of `work` as a CUDA graph. It runs `replays + 2` times in all."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return median(gpu_ms(graph.replay) for _ in range(replays))


def weight_bytes(model: LoadedModel) -> int:
    """Bytes of weights that a decode step reads: all but the table of embeddings, unless that is the head too."""
    decoder, tied = model.decoder, model.config.tie_embeddings
    return sum(p.numel() * p.element_size() for n, p in decoder.named_parameters() if tied or n != "embedding")


@contextmanager
def resident(model: LoadedModel, kv: str, batch: int, context: int, pool_bytes: int) -> Iterator[Resident]:
    """`batch` requests of `context` random tokens each, prefilled under `kv`; all is freed at the end."""
    llm = LLM(model, kv, max_num_seqs=batch, max_model_len=context + _SLACK, kv_cache_memory_bytes=pool_bytes)
    try:
        slots = _prefill(llm, batch, context)
        device = model.decoder.device
        tokens = torch.randint(1, model.config.vocab_size, (batch,), device=device)
        yield Resident(llm, torch.tensor(slots, device=device), tokens)
        llm.cache.release(slots)
    finally:
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def _prefill(llm: LLM, batch: int, context: int) -> list[int]:
    policy, each = llm.engine.bind(llm.kv), max(1, _BATCH_TOKENS // context)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, llm.model.config.vocab_size, (batch, context), generator=generator).tolist()
    slots = [llm.cache.admit(policy.rule) for _ in range(batch)]
    for at in range(0, batch, each):
        own = slots[at : at + each]
        _, failures = llm.engine.runner.prefill(prompts[at : at + each], own, [policy] * len(own))
        for failure in failures:
            if failure is not None:
                raise failure
    return slots
