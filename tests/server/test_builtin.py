"""The built-in model behind the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from siftkv import LLM, SamplingParams
from tests.server.live import Live

pytestmark = pytest.mark.model

FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    server = Live(lambda: LLM("smollm2-135m", "diffkv", formats=["bf16"], max_num_seqs=8, max_model_len=1024))
    server.ready()
    yield server
    server.check_settled()
    server.close()


@pytest.fixture(scope="module")
def client(live: Live) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_an_answer_is_that_of_the_library(client: OpenAI, live: Live) -> None:
    answer = client.chat.completions.create(model="smollm2-135m", messages=FRANCE, max_tokens=12, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    alone = LLM("smollm2-135m", "diffkv", max_num_seqs=1, max_model_len=256)
    expected = alone.generate([alone.chat_prompt(FRANCE)], SamplingParams(temperature=0, max_tokens=12))[0]
    assert answer.choices[0].message.content == expected.text


def test_json_by_schema_in_a_stream(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
        "additionalProperties": False,
    }
    stream = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "Describe the city of Paris as JSON."}],
        temperature=0,
        max_tokens=80,
        stream=True,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert json.loads(text)["city"] == "Paris"


def test_less_memory_for_the_same_tokens(client: OpenAI) -> None:
    prompt = "The history of the sea is long. " * 60
    kv = {}
    for policy in ("full", "diffkv"):
        answer = client.completions.create(
            model="smollm2-135m", prompt=prompt, max_tokens=4, temperature=0, extra_body={"kv": policy}
        )
        assert answer.usage is not None
        kv[policy] = answer.usage.model_extra["kv"]  # type: ignore[index]
    assert kv["diffkv"]["physical_bytes"] < 0.7 * kv["full"]["physical_bytes"]
    assert kv["full"]["tokens_by_tier"]["dropped"] == 0
