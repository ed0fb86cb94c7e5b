"""What the demo measures: one text, one question, several policies over one model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from siftkv import LLM, KVReport, Policy, SamplingParams, parse_policy
from siftkv.cache import dense_name
from siftkv.engine.fates import token_fates
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.errors import RequestError
from siftkv.evaluate.divergence import Divergence, DivergenceMeter
from siftkv.models import LoadedModel

FORCED_TOKENS = 128
"""Last tokens of the text that are fed one by one, as if they had been generated, to compare what comes next."""

ANSWER_TOKENS = 48
"""Tokens that are generated to time decoding; the answer ends where the model ends it."""

MIN_TEXT_TOKENS = 64
_CHAT_RESERVE = 256


@dataclass
class PolicyResult:
    """All about one policy. divergence: None for the full cache, which is the reference.

    text_report: the cache after the text. answer_report: the cache of the question, at the end of the answer.
    fates: the fate of each token of text, question and answer (see `token_fates`), by (layer, head).
    """

    kv: str
    policy: Policy
    text_report: KVReport | None = None
    divergence: Divergence | None = None
    answer: str = ""
    decode_tokens_per_s: float = 0.0
    prompt_s: float = 0.0
    answer_report: KVReport | None = None
    fates: dict[tuple[int, int], Tensor] = field(default_factory=dict)


def open_demo(model: LoadedModel, settings: list[str], text_tokens: int) -> tuple[LLM, list[PolicyResult]]:
    """An engine whose pool has the formats of the full cache and of all `settings`. Raises what `LLM` raises."""
    results = [PolicyResult(kv, parse_policy(kv)) for kv in ["full", *settings]]
    dense = dense_name(model.decoder.dtype)
    llm = LLM(
        model,
        kv=results[-1].policy,
        formats=[tier.name for result in results for tier in result.policy.tiers(dense)],
        max_model_len=min(model.config.context_limit, text_tokens + _CHAT_RESERVE),
        max_num_seqs=len(results),
        max_window=max(result.policy.window for result in results),
        sink_rows=max(result.policy.sinks for result in results),
    )
    return llm, results


def text_ids(llm: LLM, text: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of a text. Raises RequestError when that is too few to measure anything."""
    if tokens < MIN_TEXT_TOKENS:
        raise RequestError(f"a text of {tokens} tokens is too short: use {MIN_TEXT_TOKENS} or more")
    return llm.encode(text)[:tokens]


def measure_fidelity(llm: LLM, results: list[PolicyResult], ids: list[int], advance: Callable[[], None]) -> None:
    """Feed the end of a text to all policies side by side and compare them with the full cache, the first of `results`.

    `advance` is called once the beginning is read, and after each token.
    """
    forced = min(FORCED_TOKENS, len(ids) // 4)
    cut = len(ids) - forced - 1
    run = ForcedRun(llm.engine, [ForcedRow(ids[:cut], ids[cut:-1], result.policy) for result in results])
    meter = DivergenceMeter()
    for step, logits in enumerate(run):
        meter.update(logits[0], logits[1:], ids[cut + step + 1])
        advance()
    for result, report in zip(results, run.reports, strict=True):
        result.text_report = report
    for result, divergence in zip(results[1:], meter.results(), strict=True):
        result.divergence = divergence


def ask(llm: LLM, result: PolicyResult, prompt_ids: list[int], advance: Callable[[], None]) -> None:
    """Answer a prompt under one policy, alone, and time it. `advance` is called after each token."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    tokens: list[int] = []
    clock = [time.perf_counter()]
    for chunk in llm.stream(prompt_ids, params, result.policy):
        clock.append(time.perf_counter())
        tokens += chunk.token_ids
        if chunk.output is not None:
            result.answer_report = chunk.output.kv
        elif len(tokens) == ANSWER_TOKENS - 1:
            result.fates = _all_fates(llm)
        advance()
    ends = [i for i, token in enumerate(tokens) if token in llm.model.config.eos_token_ids]
    result.answer = llm.tokenizer.decode(tokens[: ends[0] if ends else None], skip_special_tokens=True).strip()
    result.prompt_s = clock[1] - clock[0]
    result.decode_tokens_per_s = (ANSWER_TOKENS - 2) / (clock[-2] - clock[1])


def _all_fates(llm: LLM) -> dict[tuple[int, int], Tensor]:
    """Fates of the one request that is running, for every head."""
    [sequence] = llm.engine.scheduler.running
    spec = llm.cache.spec
    heads = [(layer, head) for layer in range(spec.num_layers) for head in range(spec.num_kv_heads)]
    return {(layer, head): token_fates(llm.cache, sequence.slot, layer, head) for layer, head in heads}
