"""`LLM`: a model with a sifted cache, for offline use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from siftkv.cache import KVCache
from siftkv.defaults import DEFAULT_KV
from siftkv.engine.conditioning import condition
from siftkv.engine.engine import Engine
from siftkv.engine.graphs import DecodeGraphs
from siftkv.engine.guard import warn_of_fragile_keys
from siftkv.engine.layer_costs import layer_costs
from siftkv.engine.memory import cache_budget
from siftkv.engine.outputs import RequestOutput, StreamChunk
from siftkv.engine.sampling_params import SamplingParams
from siftkv.engine.scheduler import Admission, Preemption
from siftkv.engine.sequence import Sequence
from siftkv.engine.sizing import PoolRequest, plan_spec
from siftkv.errors import RequestError, SiftKVError
from siftkv.kernels import get_kernels
from siftkv.models import LoadedModel, load_model
from siftkv.policies import Policy, parse_policy

Prompt = str | SequenceOf[int]
Kv = str | Policy


class LLM:
    """A model and its sifted KV cache.

    Example:
        >>> llm = LLM("smollm2-135m", kv="diffkv:alpha_low=0.02")
        >>> out = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
        >>> out[0].text, out[0].kv.ratio

    model: a built-in name, a local folder or `.gguf` file, a Hub id, or a `LoadedModel`.
    kv: the default policy of requests. formats: further formats that requests may use besides those of `kv`; `bf16`
        (the model's dtype) for requests with kv="full".
    dtype: `auto` = the checkpoint's. device: `cpu` or a CUDA device.
    max_model_len: longest context in tokens (default: the model's). max_num_seqs: requests resident at a time.
    kv_cache_memory_bytes: of the whole cache, tables and windows included. Default: on a GPU what
        `gpu_memory_utilization` of its memory leaves beside the weights, the largest passes and their graphs; on a CPU
        1 GiB, or what one request of `max_model_len` tokens takes in the pool's most precise format, if that is more.
    conditioning: `full`, `bias` or `none`, see `siftkv.engine.conditioning`; `full` changes the model's weights in
        place, exactly. kernels: `auto`, `numba`, `cuda` or `reference`.
    preemption: `swap` or `recompute` what is evicted when pages run out; swap_space_bytes bounds the former. admission:
        `careful` leaves running requests room to grow, `greedy` starts all that fits now.
    enforce_eager: on a GPU, run decode steps without CUDA graphs.
    max_window, sink_rows: the largest `window` and `sinks` that a request's policy may ask for (default: those of `kv`,
        at least 64 and 4; `sift` opens windows of its own size only).

    Raises ModelError, PolicyError, FormatError or SiftKVError with a message that says what to do.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        kv: Kv = DEFAULT_KV,
        *,
        formats: Iterable[str] = (),
        dtype: str | torch.dtype = "auto",
        device: str = "cpu",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 8192,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float = 0.9,
        conditioning: str = "full",
        kernels: str = "auto",
        preemption: Preemption = "swap",
        swap_space_bytes: int = 4 << 30,
        admission: Admission = "careful",
        max_window: int | None = None,
        sink_rows: int | None = None,
        enforce_eager: bool = False,
        check_integrity: bool = False,
    ) -> None:
        self.kv = parse_policy(kv)
        if preemption not in ("swap", "recompute"):
            raise SiftKVError(f"unknown preemption {preemption!r}: use swap or recompute")
        if admission not in ("careful", "greedy"):
            raise SiftKVError(f"unknown admission {admission!r}: use careful or greedy")
        self.model = model if isinstance(model, LoadedModel) else load_model(model, dtype, device)
        config, decoder = self.model.config, self.model.decoder
        self.conditioning = condition(self.model, conditioning)
        if self.kv.weighs_layers:
            layer_costs(decoder, self.model.tokenizer)  # now, while there is memory
        if kv_cache_memory_bytes is None and decoder.device.type == "cuda":
            longest = max_model_len or config.context_limit
            kv_cache_memory_bytes = cache_budget(
                decoder, gpu_memory_utilization, max_num_batched_tokens, max_num_seqs, longest
            )
        spec = plan_spec(
            config,
            decoder.dtype,
            PoolRequest(
                policy=self.kv,
                formats=(formats,) if isinstance(formats, str) else tuple(formats),
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                memory_bytes=kv_cache_memory_bytes,
                max_window=max_window,
                sink_rows=sink_rows,
                positions=self.conditioning.has_bias,
                gpu=decoder.device.type == "cuda",
            ),
            self.conditioning,
        )
        warn_of_fragile_keys(self.model, conditioning, spec.tiers)
        self.cache = KVCache(spec, self.conditioning, get_kernels(kernels, decoder.device, decoder.dtype, spec.tiers))
        self.engine = Engine(
            config,
            decoder,
            self.cache,
            self.model.tokenizer,
            config.eos_token_ids,
            spec.max_len,
            max_num_batched_tokens,
            preemption,
            swap_space_bytes,
            check_integrity,
            admission,
        )
        if self.cache.kernels.DEFERS_FAULTS and not enforce_eager:
            self.engine.runner.graphs = DecodeGraphs(decoder, self.cache)
        self.engine.bind(self.kv)
        self._streams: dict[str, deque[StreamChunk]] = {}

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        kv: Kv | SequenceOf[Kv] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, batched continuously, and return their outputs in order.

        prompts: one prompt or several, each a string or token ids. sampling_params, kv: one for all, or one a prompt.
        Raises RequestError, PolicyError or FormatError before anything runs when a request is invalid. When a request
        fails while it runs (NumericsError, OutOfPages, PromptFailed, StepFailed), the others are finished first; the
        exception's `outputs` holds what was generated. Raises DeviceLost when the GPU has failed for good.
        """
        batch = _as_list(prompts)
        if not batch:
            return []
        params = _spread(
            sampling_params if sampling_params is not None else SamplingParams(), len(batch), "sampling_params"
        )
        policies = [parse_policy(x) for x in _spread(kv if kv is not None else self.kv, len(batch), "kv")]
        ids: list[str] = []
        try:
            for prompt, param, policy in zip(batch, params, policies, strict=True):
                ids.append(self._add(prompt, param, policy))
            while any(s.finish_reason is None for i in ids for s in self.engine.sequences(i)):
                self._step()
            return self._collect(ids)
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
                self.engine.forget(request_id)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, kv: Kv | None = None
    ) -> Iterator[StreamChunk]:
        """Run one prompt and yield what each step adds. Closing the iterator cancels the request and gives its pages
        back. Streams and calls of `generate` may be interleaved.

        An invalid request raises here, before the first chunk is asked for.
        """
        params, policy = sampling_params or SamplingParams(), parse_policy(kv if kv is not None else self.kv)
        self._check(prompt, params, policy)
        return self._stream(prompt, params, policy)

    def _stream(self, prompt: Prompt, params: SamplingParams, policy: Policy) -> Iterator[StreamChunk]:
        request_id = self._add(prompt, params, policy)
        chunks = self._streams[request_id] = deque()
        try:
            while chunks or any(s.finish_reason is None for s in self.engine.sequences(request_id)):
                if chunks:
                    yield chunks.popleft()
                else:
                    self._step()
            _raise_first(self.engine.sequences(request_id), None)
        finally:
            del self._streams[request_id]
            self.engine.abort(request_id)
            self.engine.forget(request_id)

    def _step(self) -> None:
        """One step of the engine; what it adds to open streams waits for them."""
        for chunk in self.engine.step():
            if chunk.request_id in self._streams:
                self._streams[chunk.request_id].append(chunk)

    def chat_prompt(self, messages: SequenceOf[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where the assistant answers.

        messages: `{"role": ..., "content": ...}` each. Raises RequestError for a model without a template, or messages
            that it refuses.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(f"{self.model.name} has no chat template: use generate() with a plain prompt")
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def chat(
        self,
        messages: SequenceOf[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        kv: Kv | None = None,
    ) -> RequestOutput:
        """Answer a conversation."""
        return self.generate([self.chat_prompt(messages)], sampling_params, kv)[0]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, special tokens as the tokenizer adds them.

        Raises RequestError for anything but text or whole numbers.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(ids, SequenceOf) or not all(isinstance(t, Integral) and not isinstance(t, bool) for t in ids):
            raise RequestError(f"a prompt is a string or a list of token ids (whole numbers), not {str(prompt)[:60]!r}")
        return [int(t) for t in ids]

    def _add(self, prompt: Prompt, params: SamplingParams, policy: Policy) -> str:
        ids = self._check(prompt, params, policy)
        return self.engine.add(ids, params, policy, prompt if isinstance(prompt, str) else None)

    def _check(self, prompt: Prompt, params: SamplingParams, policy: Policy) -> list[int]:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        ids = self.encode(prompt)
        self.engine.check_prompt(ids)
        self.engine.bind(policy)
        return ids

    def _collect(self, ids: list[str]) -> list[RequestOutput]:
        outputs, failed = [], []
        for request_id in ids:
            sequences = self.engine.sequences(request_id)
            failed += [s for s in sequences if s.error is not None]
            first = sequences[0]
            outputs.append(
                RequestOutput(
                    request_id, first.prompt, first.prompt_ids, [s.output() for s in sequences], first.metrics()
                )
            )
        _raise_first(failed, outputs)
        return outputs


def _raise_first(sequences: list[Sequence], outputs: list[RequestOutput] | None) -> None:
    for sequence in sequences:
        if sequence.error is not None:
            sequence.error.outputs = outputs  # type: ignore[attr-defined]
            raise sequence.error


def _as_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be strings or lists of token ids, not {type(prompts).__name__}")
    items: list[Any] = list(prompts)
    if items and all(isinstance(x, Integral) for x in items):
        return [items]
    return items


def _spread(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise RequestError(f"{name} has {len(value)} entries for {count} prompts: give one, or one a prompt")
        return list(value)
    return [value] * count
