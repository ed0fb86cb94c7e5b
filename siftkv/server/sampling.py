"""From a request body to `SamplingParams`: OpenAI's defaults under the model makers' advice, and clear refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from siftkv.engine.guide import Guide
from siftkv.engine.sampling_params import SamplingParams
from siftkv.server.errors import ApiError
from siftkv.server.protocol import ChatCompletionRequest, CompletionRequest, Generate

MOST_STOPS = 128
MOST_STOP_IDS = 1024
MOST_BIASES = 1024
"""Stop strings, stop token ids and biases of a request: each takes time of the thread that serves everybody."""
COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions; a chat goes on to the end of the context."""

_OLDER = "is vLLM's older field and not served: use structured_outputs"
_UNSERVED = dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _OLDER) | {
    "allowed_token_ids": "is not served: use logit_bias, or structured_outputs",
    "bad_words": "is not served: use logit_bias",
    "truncate_prompt_tokens": "is not served: cut the prompt yourself",
}
_DIRECT = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output", "priority"),
)


def sampling_params(
    body: ChatCompletionRequest | CompletionRequest, advice: Mapping[str, float], guide: Guide | None, max_n: int
) -> SamplingParams:
    """advice: the sampling that the model's makers recommend, which holds where a request says nothing.

    Raises RequestError or ApiError for what is out of range or not served.
    """
    refuse(body)
    asked: dict[str, Any] = {k: int(v) if k == "top_k" else v for k, v in advice.items()}
    asked |= {name: getattr(body, name) for name in _DIRECT if getattr(body, name) is not None}
    if body.seed is not None:
        asked["seed"] = body.seed % 2**63
    if body.logit_bias:
        asked["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    if guide is not None and (body.ignore_eos or body.min_tokens):
        field = "ignore_eos" if body.ignore_eos else "min_tokens"
        raise ApiError(400, f"{field} cannot be combined with an output that a grammar ends", field, "invalid_value")
    n = 1 if body.n is None else body.n
    if n > max_n:
        raise ApiError(400, f"n must be at most {max_n} on this server, not {n}", "n", "invalid_value")
    chat = isinstance(body, ChatCompletionRequest)
    logprobs = _chat_logprobs(body) if isinstance(body, ChatCompletionRequest) else body.logprobs
    return SamplingParams(
        n=n, max_tokens=max_tokens(body, None if chat else COMPLETION_TOKENS), logprobs=logprobs, guide=guide, **asked
    )


def max_tokens(body: ChatCompletionRequest | CompletionRequest, default: int | None) -> int | None:
    """Tokens that a request asks for; None = as many as the context holds."""
    asked = body.max_completion_tokens if isinstance(body, ChatCompletionRequest) else None
    asked = body.max_tokens if asked is None else asked
    return default if asked is None else asked


def check_context(prompt_tokens: int, params: SamplingParams, max_model_len: int) -> None:
    """Raise ApiError when prompt and output cannot both fit the context."""
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if prompt_tokens + wanted > max_model_len:
        raise ApiError(
            400,
            f"this model's context holds {max_model_len} tokens; the prompt has {prompt_tokens} and "
            f"max_tokens asks for {wanted}: shorten one of them",
            "prompt" if prompt_tokens >= max_model_len else "max_tokens",
            "context_length_exceeded",
        )


def refuse(body: Generate) -> None:
    """Raise ApiError for fields that are understood and not served."""
    if body.prompt_logprobs is not None:
        _no("prompt_logprobs", "prompt_logprobs is not served: a prompt's keys are sifted as it is read")
    if body.best_of not in (None, 1 if body.n is None else body.n):
        _no("best_of", "best_of is not served beyond n: ask for n completions and choose")
    for name, reason in _UNSERVED.items():
        if getattr(body, name) not in (None, [], ""):
            _no(name, f"{name} {reason}")
    if body.skip_special_tokens is False:
        _no("skip_special_tokens", "skip_special_tokens=false is not served: special tokens have no text here")
    if body.use_beam_search:
        _no("use_beam_search", "beam search is not served: use n with a temperature")
    for name, most in (("stop", MOST_STOPS), ("stop_token_ids", MOST_STOP_IDS), ("logit_bias", MOST_BIASES)):
        given = getattr(body, name)
        if isinstance(given, (list, dict)) and len(given) > most:
            raise ApiError(400, f"{name} must hold at most {most}, not {len(given)}", name, "invalid_value")
    if body.stream_options is not None and not body.stream:
        _no("stream_options", "stream_options may only be given with stream=true")
    if isinstance(body, CompletionRequest):
        if body.echo:
            _no("echo", "echo is not served: put the prompt before the text yourself")
        if body.suffix:
            _no("suffix", "suffix is not served: put the model's own infill tokens into the prompt")
    elif isinstance(body, ChatCompletionRequest):
        if body.functions:
            _no("functions", "functions is OpenAI's older field and not served: use tools")
        if body.modalities not in (None, ["text"]) or body.audio is not None:
            _no("modalities", "this server answers with text alone")
        if body.web_search_options is not None:
            _no("web_search_options", "web search is not served: put what was found into the messages")


def _no(field: str, message: str) -> None:
    raise ApiError(400, message, field, "unsupported_parameter")


def _chat_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", "top_logprobs", "invalid_value")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise ApiError(400, f"top_logprobs must be from 0 to 20, not {body.top_logprobs}", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise ApiError(400, f"logit_bias has the key {key[:40]!r}, which is no token id", "logit_bias") from None
