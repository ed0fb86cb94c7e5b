"""End-to-end speed on a GPU: a model of a given shape with random weights, a KV pool of fixed size, greedy, no early
ends.

Random weights attend almost uniformly, so thresholds do not sift as they do on text: use the policy `fixed` for the
speed at a given ratio.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch

from siftkv.engine.llm import LLM
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import SiftKVError
from siftkv.models import Decoder, LoadedModel, ModelConfig
from siftkv.policies import parse_policy

PASS_TOKENS = 16384
"""Tokens of a prompt pass at most: between two passes the GPU waits for the host."""

LLAMA3_8B = ModelConfig("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 16384, rms_norm_eps=1e-5)


@dataclass(frozen=True)
class Workload:
    """Requests of equal length: prompt and output tokens each. pool_bytes: of the whole KV cache, tables and windows
    included. slots: most requests at a time, each of which takes a window of that pool; 0 = all.
    """

    requests: int
    prompt: int
    output: int
    pool_bytes: int = 12 << 30
    slots: int = 0


@dataclass(frozen=True)
class Throughput:
    """What a run gave.

    seconds: from the first request to the last token. output_tokens_per_second: generated tokens over that.
        decode_tokens_per_second: over the median decode step with the most requests resident. step_ms: that step.
        resident: most requests at a time. ratio: physical bytes by bf16's, mean over requests at their end.
        preemptions: in all.
    """

    kv: str
    seconds: float
    output_tokens_per_second: float
    decode_tokens_per_second: float
    step_ms: float
    resident: int
    ratio: float
    preemptions: int


def random_llama(config: ModelConfig = LLAMA3_8B, device: str = "cuda") -> LoadedModel:
    """A model of this shape with random bf16 weights, and a tokenizer that names its tokens by number."""
    if not torch.cuda.is_available():
        raise SiftKVError("this benchmark needs a CUDA device: on a CPU use `siftkv bench cpu`")
    decoder = Decoder(config, torch.bfloat16, device)
    for name, weight in decoder.named_parameters():
        weight.data.normal_(1.0 if name.endswith("norm") else 0.0, 0.02)
    return LoadedModel(config, decoder, _NumberTokenizer(), "random")


class _NumberTokenizer:
    """Stands in for a tokenizer where only speed counts."""

    chat_template = None

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(f" {t}" for t in token_ids)


def measure(model: LoadedModel, kv: str, work: Workload, eager: bool = False) -> Throughput:
    """Run a workload under a policy. Compilation and graph capture come before the clock starts.

    Windows are as long as this policy asks, with no room for others'.
    """
    policy = parse_policy(kv)
    llm = LLM(
        model,
        policy,
        max_num_seqs=work.slots or work.requests,
        max_window=policy.window,
        max_model_len=work.prompt + work.output + 1,
        max_num_batched_tokens=PASS_TOKENS,
        kv_cache_memory_bytes=work.pool_bytes,
        enforce_eager=eager,
    )
    try:
        generator = torch.Generator().manual_seed(0)
        vocab = model.config.vocab_size
        prompts = torch.randint(1, vocab, (work.requests, work.prompt), generator=generator).tolist()
        batch = max(1, llm.engine.scheduler.max_batched_tokens // work.prompt)  # the library plans for each shape once
        llm.generate(prompts[:batch], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        if llm.engine.runner.graphs is not None:
            llm.engine.runner.graphs.capture_all()
        return _timed(llm, kv, prompts, SamplingParams(temperature=0, max_tokens=work.output, ignore_eos=True))
    finally:
        del llm
        gc.collect()
        torch.cuda.empty_cache()


def _timed(llm: LLM, kv: str, prompts: list[list[int]], params: SamplingParams) -> Throughput:
    engine = llm.engine
    ids = [engine.add(p, params, llm.kv) for p in prompts]
    steps: list[tuple[int, float]] = []
    torch.cuda.synchronize()
    begin = last = time.perf_counter()
    while engine.has_work:
        produced = sum(len(chunk.token_ids) for chunk in engine.step())
        now = time.perf_counter()
        steps.append((produced, now - last))
        last = now
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    sequences = [engine.sequences(i)[0] for i in ids]
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
    for request_id in ids:
        engine.forget(request_id)
    resident = max(count for count, _ in steps)
    full = sorted(t for count, t in steps if count == resident)
    step = full[len(full) // 2]
    reports = [s.kv for s in sequences if s.kv is not None]
    return Throughput(
        kv=kv,
        seconds=seconds,
        output_tokens_per_second=sum(len(s.output_ids) for s in sequences) / seconds,
        decode_tokens_per_second=resident / step,
        step_ms=step * 1e3,
        resident=resident,
        ratio=sum(r.ratio for r in reports) / len(reports),
        preemptions=sum(s.preemptions for s in sequences),
    )
