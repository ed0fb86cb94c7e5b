"""Completions, models and tokens: the `openai` client, and the shapes that vLLM's benchmark sends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from siftkv import SamplingParams
from tests.server.live import MODEL, Live, byte_llm


@pytest.fixture(scope="module")
def client(live: Live) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_text_is_the_engines(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=10, temperature=0)
    expected = byte_llm().generate(["Once upon"], SamplingParams(temperature=0, max_tokens=10))[0]
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 10)


def test_defaults_are_openais(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="a", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_several_prompts_and_token_ids(client: OpenAI, live: Live) -> None:
    prompts = ["abc", "defg"]
    settings: Any = {"model": MODEL, "max_tokens": 5, "n": 2, "seed": 1}
    answer = client.completions.create(prompt=prompts, **settings)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 7
    ids = [live.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert client.completions.create(prompt=ids, **settings).choices == answer.choices
    alone = client.completions.create(prompt=ids[1], **settings)
    assert [c.text for c in alone.choices] == [c.text for c in answer.choices[2:]]
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(prompt=prompts, **settings, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in answer.choices]


def test_logprobs_have_offsets(client: OpenAI) -> None:
    settings: Any = {"model": MODEL, "prompt": "abc", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**settings).choices[0]
    report = whole.logprobs
    assert report is not None
    assert report.tokens is not None
    assert report.top_logprobs is not None
    assert report.text_offset == [sum(map(len, report.tokens[:i])) for i in range(6)]
    for token, logprob, top in zip(report.tokens, report.token_logprobs or (), report.top_logprobs, strict=True):
        assert top[token] == logprob
    streamed: dict[str, list[Any]] = {"tokens": [], "text_offset": []}
    for chunk in client.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                streamed["tokens"] += choice.logprobs.tokens or []
                streamed["text_offset"] += choice.logprobs.text_offset or []
    assert streamed == {"tokens": report.tokens, "text_offset": report.text_offset}


def test_the_shape_of_vllms_benchmark(live: Live) -> None:
    body = {
        "model": MODEL,
        "prompt": "a b c",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 7,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "request_id": "benchmark-0",
        "top_k": -1,
        "min_p": 0.0,
        "stop_token_ids": [],
        "min_tokens": 2,
        "priority": 3,
        "user": None,
    }
    answer = live.post("/v1/completions", body, headers={"x-request-id": "benchmark-0"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == "benchmark-0"
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    parsed = [json.loads(event) for event in events[:-1]]
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["completion_tokens"] == 7
    assert all(event["usage"] is None for event in parsed[:-1])
    assert parsed[-2]["choices"][0]["finish_reason"] == "length"


def test_usage_in_every_chunk(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 4, "stream": True, "ignore_eos": True, "stream_options": options}
    events = live.post("/v1/completions", body).text.split("\n\n")[:-2]
    counts = [json.loads(event.removeprefix("data: "))["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 4


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 99999]}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"kv": "nonsense"}, "kv"),
        ({"kv": "uniform:k2v2"}, "kv"),
        ({"kv": "diffkv:window=100000"}, "kv"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_served_says_so(client: OpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", extra_body=extra)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_models(client: OpenAI, live: Live) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert model.model_extra["max_model_len"] == 2048  # type: ignore[index]
    assert client.models.retrieve(MODEL).id == MODEL
    for call in (
        lambda: client.models.retrieve("other"),
        lambda: client.completions.create(model="other", prompt="a"),
    ):
        with pytest.raises(NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found"


def test_embeddings_are_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="embeddings are not served"):
        client.embeddings.create(model=MODEL, input="a")


def test_responses_are_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="use /v1/chat/completions"):
        client.responses.create(model=MODEL, input="a")


def test_tokens_there_and_back(live: Live) -> None:
    answer = live.post("/tokenize", {"prompt": "héllo", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 6
    assert answer["max_model_len"] == 2048
    assert live.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}
    assert live.post("/detokenize", {"tokens": [99999]}).status_code == 400
    assert live.post("/tokenize", {}).status_code == 400
