"""Prompt and decode speed on a CPU against `transformers`: same machine, same process, same weights and dtype, greedy,
a fixed number of tokens.

Engines take turns within each repeat, so that a shared machine's drift hits all of them alike; medians over repeats are
compared. All are timed from the call to the end of each step on the host, sampling included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from siftkv.benchmarks.opening import open_for
from siftkv.benchmarks.prompt_memory import PromptMemory, trace_prompt
from siftkv.benchmarks.texts import Text, cut_windows, leading_tokens, tokenize
from siftkv.engine.llm import LLM
from siftkv.engine.outputs import KVReport
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import ModelError, SiftKVError
from siftkv.models import LoadedModel, list_models, pull
from siftkv.policies import parse_policy

SETTINGS = ("full", "diffkv")
TRANSFORMERS = "transformers"
_WARM_PROMPT, _WARM_TOKENS = 128, 4

Prompts = list[list[int]]


@dataclass(frozen=True)
class Case:
    """A batch of `batch` prompts of `context` tokens each, and `new_tokens` decode steps after the token that the
    prompt gives.
    """

    context: int
    batch: int
    new_tokens: int

    def __post_init__(self) -> None:
        for name in ("context", "batch", "new_tokens"):
            if getattr(self, name) < 1:
                raise SiftKVError(f"{name}={getattr(self, name)}: use 1 or more")


@dataclass(frozen=True)
class Run:
    """One timed batch. prefill_s: until every request has its first token. steps_s: each decode step. Bytes are of all
    requests together.
    """

    prefill_s: float
    steps_s: list[float]
    kv_bytes: int
    kv_peak_bytes: int


@dataclass(frozen=True)
class Speed:
    """What one engine did in one case, medians over repeats. Tokens a second count all requests of the batch."""

    engine: str
    case: Case
    runs: list[Run]

    @property
    def prefill_tokens_s(self) -> float:
        return self.case.batch * self.case.context / median(run.prefill_s for run in self.runs)

    @property
    def decode_tokens_s(self) -> float:
        return self.case.batch * self.case.new_tokens / median(sum(run.steps_s) for run in self.runs)

    @property
    def step_s(self) -> float:
        """Median decode step, in seconds."""
        return median(step for run in self.runs for step in run.steps_s)

    @property
    def kv_bytes(self) -> int:
        """KV bytes at the end."""
        return self.runs[-1].kv_bytes

    @property
    def kv_peak_bytes(self) -> int:
        return max(run.kv_peak_bytes for run in self.runs)


Runner = Callable[[Prompts, int], Run]
"""Runs prompts and so many decode steps."""


def prompts_for(model: LoadedModel, text: Text, case: Case) -> Prompts:
    """Distinct prompts of exactly `context` tokens, spread over the text; they overlap where the text is short.

    Raises SiftKVError for a text that is too short for one prompt.
    """
    ids, lead = tokenize(model.tokenizer, text), leading_tokens(model.tokenizer)
    room = len(ids) - (case.context - len(lead))
    stride = max(1, min(case.context, room // max(1, case.batch - 1)))
    return cut_windows(ids, lead, text.name, case.context, case.batch, stride)


def compare(
    model: LoadedModel,
    reference: Any,
    settings: Sequence[str],
    cases: Sequence[Case],
    text: Text,
    repeats: int = 3,
    kernels: str = "auto",
    progress: Callable[[str], None] = lambda what: None,
) -> list[Speed]:
    """Time a model of `transformers` and every `kv` setting in every case.

    kernels: as in `LLM`. progress: told what runs next.
    Raises PolicyError and RequestError for settings and cases that do not fit the model.
    """
    found: list[Speed] = []
    for case in cases:
        prompts = prompts_for(model, text, case)
        runners: dict[str, Runner] = {TRANSFORMERS: TransformersRunner(reference)}
        for kv in settings:
            tokens = case.context + case.new_tokens + 1
            runners[kv] = SiftRunner(open_for(model, parse_policy(kv), tokens, case.batch, kernels=kernels))
        for name, run in runners.items():
            progress(f"{name}: warming up")
            run([p[:_WARM_PROMPT] for p in prompts], min(_WARM_TOKENS, case.new_tokens))
        runs: dict[str, list[Run]] = {name: [] for name in runners}
        for repeat in range(repeats):
            for name, run in runners.items():
                progress(f"{name}: {case.batch} x {case.context} tokens, {repeat + 1} of {repeats}")
                runs[name].append(run(prompts, case.new_tokens))
        found += [Speed(name, case, own) for name, own in runs.items()]
    return found


def prompt_memory(
    model: LoadedModel, settings: Sequence[str], text: Text, context: int, kernels: str = "auto"
) -> dict[str, PromptMemory]:
    """How a prompt of `context` tokens is held while it is prefilled, by setting."""
    [prompt] = prompts_for(model, text, Case(context, 1, 1))
    found = {}
    for kv in settings:
        policy = parse_policy(kv)
        found[kv] = trace_prompt(open_for(model, policy, context + 1, 1, kernels=kernels), prompt, policy)
    return found


class SiftRunner:
    """The loop of `LLM.generate` with a clock around each step."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def __call__(self, prompts: Prompts, new_tokens: int) -> Run:
        engine = self.llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens + 1, ignore_eos=True)
        prefill, steps, ids = 0.0, [], []
        try:
            start = time.perf_counter()
            ids = [engine.add(prompt, params, self.llm.kv) for prompt in prompts]
            while engine.has_work:
                waiting = len(engine.scheduler.waiting)
                engine.step()
                now = time.perf_counter()
                if len(engine.scheduler.waiting) < waiting:
                    prefill += now - start
                else:
                    steps.append(now - start)
                start = now
            sequences = [engine.sequences(i)[0] for i in ids]
            for sequence in sequences:
                if sequence.error is not None:
                    raise sequence.error
            reports = [s.kv for s in sequences if s.kv is not None]
            return Run(prefill, steps, _sum(reports, "physical_bytes"), _sum(reports, "peak_bytes"))
        finally:
            for request_id in ids:
                engine.abort(request_id)
                engine.forget(request_id)


def _sum(reports: list[KVReport], field: str) -> int:
    return sum(getattr(report, field) for report in reports)


class TransformersRunner:
    """`generate` of a `transformers` model with its default cache. A clock is read whenever a token is done."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, prompts: Prompts, new_tokens: int) -> Run:
        token_ids = torch.tensor(prompts)
        stamps: list[float] = []

        def stamp(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        start = time.perf_counter()
        out = self.model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            min_new_tokens=new_tokens + 1,
            max_new_tokens=new_tokens + 1,
            pad_token_id=0,
            stopping_criteria=[stamp],
            return_dict_in_generate=True,
        )
        cache = out.cache if "cache" in out else out.past_key_values  # the name in older releases
        held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
        return Run(stamps[0] - start, [b - a for a, b in pairwise(stamps)], held, held)


def load_reference(name: str, dtype: torch.dtype) -> Any:
    """The same model in `transformers`, with its fused attention. Raises ModelError when it cannot be opened."""
    from transformers import AutoModelForCausalLM

    from siftkv.models.gguf_file import quiet

    if name.endswith(".gguf"):
        raise ModelError("transformers needs more than a .gguf file: compare a folder, a Hub id or a built-in model")
    source: str | Path = pull(name) if name in {m.name for m in list_models()} else name
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ModelError(f"transformers cannot open {name}: {error}") from error
    return model.eval()
