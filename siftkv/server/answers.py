"""Pieces of OpenAI's responses, as plain dicts: they are made once a token, where a validated model would cost more
than the token's HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from siftkv.engine.outputs import CompletionOutput, TokenLogprob
from siftkv.server.renderer import Renderer


def usage(prompt_tokens: int, outputs: Iterable[CompletionOutput]) -> dict[str, Any]:
    """Token counts of a response, and `kv`: what its cache held. prompt_tokens: of all prompts, each counted once."""
    outputs = list(outputs)
    completion = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "kv": kv_usage(outputs),
    }


def kv_usage(outputs: Iterable[CompletionOutput]) -> dict[str, Any]:
    """Over all completions: physical bytes at their ends and at their peaks, bytes of the same tokens in bf16 and the
    ratio, and entries (a token in one head of one layer) by tier.
    """
    reports = [output.kv for output in outputs if output.kv is not None]
    physical, plain = sum(r.physical_bytes for r in reports), sum(r.bf16_bytes for r in reports)
    tiers: Counter[str] = Counter()
    for report in reports:
        tiers.update(report.tokens_by_tier)
    return {
        "policy": reports[0].policy if reports else None,
        "physical_bytes": physical,
        "peak_bytes": sum(r.peak_bytes for r in reports),
        "bf16_bytes": plain,
        "ratio": physical / plain if plain else 0.0,
        "tokens_by_tier": dict(tiers),
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob], renderer: Renderer) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {
        "content": [
            _token(p.token_id, p.logprob, renderer)
            | {"top_logprobs": [_token(token, value, renderer) for token, value in p.top.items()]}
            for p in logprobs
        ],
        "refusal": None,
    }


def _token(token_id: int, logprob: float, renderer: Renderer) -> dict[str, Any]:
    text = renderer.token_text(token_id)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode("utf-8"))}


def completion_logprobs(
    logprobs: Sequence[TokenLogprob], renderer: Renderer, offset: int
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion's choice, and the offset behind them. offset: characters of the tokens before."""
    offsets, tokens = [], []
    for p in logprobs:
        offsets.append(offset)
        tokens.append(renderer.token_text(p.token_id))
        offset += len(tokens[-1])
    report = {
        "tokens": tokens,
        "token_logprobs": [max(p.logprob, -9999.0) for p in logprobs],
        "top_logprobs": [_top(p, renderer) for p in logprobs],
        "text_offset": offsets,
    }
    return report, offset


def _top(report: TokenLogprob, renderer: Renderer) -> dict[str, float]:
    top = {renderer.token_text(token): max(value, -9999.0) for token, value in report.top.items()}
    return top | {renderer.token_text(report.token_id): max(report.logprob, -9999.0)}
