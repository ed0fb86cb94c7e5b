"""Chat completions through the `openai` client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI, UnprocessableEntityError

from tests.server.live import MODEL, Live, byte_llm

HELLO: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(live: Live) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


def test_an_answer_has_every_field(client: OpenAI, live: Live) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    prompt = live.post("/tokenize", {"messages": HELLO}).json()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt["count"]
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == prompt["count"] + 12
    engine = byte_llm().generate([prompt["tokens"]], sampling(max_tokens=12))[0]
    assert choice.message.content == engine.text


def sampling(**settings: Any) -> Any:
    from siftkv import SamplingParams

    return SamplingParams(temperature=0, **settings)


def test_usage_says_what_the_cache_held(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, temperature=0)
    assert answer.usage is not None
    kv = answer.usage.model_extra["kv"]  # type: ignore[index]
    seen = answer.usage.total_tokens - 1  # the last token was never fed back
    assert sum(kv["tokens_by_tier"].values()) == seen * 2 * 2  # layers and kv heads
    assert kv["ratio"] == kv["physical_bytes"] / kv["bf16_bytes"]
    assert kv["policy"].startswith("diffkv:")
    full = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, temperature=0, extra_body={"kv": "full:window=8"}
    )
    assert full.usage is not None
    tiers = full.usage.model_extra["kv"]["tokens_by_tier"]  # type: ignore[index]
    assert tiers["dropped"] == tiers["k8v4"] == 0
    assert tiers["fp32"] > 0


def test_streamed_text_is_the_whole_text(client: OpenAI) -> None:
    settings: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 20, "temperature": 0.9, "seed": 5, "n": 2}
    whole = client.chat.completions.create(**settings)
    texts, reasons, usages = ["", ""], {}, []
    for chunk in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        if chunk.usage is not None:
            usages.append((chunk.choices, chunk.usage))
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    [(choices, usage)] = usages
    assert choices == []
    assert whole.usage is not None
    assert usage.model_dump() == whole.usage.model_dump()


def test_logprobs(client: OpenAI) -> None:
    settings: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**settings, top_logprobs=3).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    assert len(whole.logprobs.content) == 6
    for token in whole.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob < 0
        assert bytes(token.bytes or ()).decode() == token.token
    streamed = [
        token
        for chunk in client.chat.completions.create(**settings, top_logprobs=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert streamed == whole.logprobs.content


def test_stop_strings_and_stop_tokens(client: OpenAI) -> None:
    def text(**settings: Any) -> Any:
        extra = settings.pop("extra_body", {})
        return client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=40,
            temperature=0,
            extra_body={"ignore_eos": True} | extra,
            **settings,
        ).choices[0]

    whole = text()
    content = whole.message.content
    stop = content[5:7]
    stopped = text(stop=[stop])
    assert stopped.message.content == content[: content.index(stop)]
    assert (stopped.finish_reason, stopped.model_extra["stop_reason"]) == ("stop", stop)
    kept = text(stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.message.content == content[: content.index(stop) + len(stop)]


def test_logit_bias_forces_a_token(client: OpenAI, live: Live) -> None:
    [token] = live.post("/tokenize", {"prompt": "x"}).json()["tokens"]
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=5, temperature=0, logit_bias={str(token): 100}
    )
    assert answer.choices[0].message.content == "xxxxx"


def test_content_parts_are_read_and_pictures_refused(client: OpenAI, live: Live) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    joined = live.post("/tokenize", {"messages": [{"role": "user", "content": "Hel\nlo"}]}).json()["count"]
    answer = client.chat.completions.create(model=MODEL, messages=parts, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == joined
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(BadRequestError, match="this server takes text") as caught:
        client.chat.completions.create(model=MODEL, messages=picture)
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"modalities": ["text", "audio"], "audio": {"voice": "a", "format": "wav"}}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
    ids=str,
)
def test_what_would_change_the_answer_and_is_not_served_is_refused(
    client: OpenAI, settings: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, **settings)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


def test_hints_are_passed_over(client: OpenAI) -> None:
    hints: dict[str, Any] = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x"}
    hints |= {"reasoning_effort": "low", "verbosity": "low", "prompt_cache_key": "k", "user": "me"}
    hints["prediction"] = {"type": "content", "content": "Hi"}
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=2, **hints)
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 2


@pytest.mark.parametrize("kind", ["custom", "allowed_tools"])
def test_other_tool_choices_name_the_field(client: OpenAI, kind: str) -> None:
    choice: Any = {"type": kind, kind: {"name": "f", "mode": "auto", "tools": []}}
    with pytest.raises(UnprocessableEntityError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, tool_choice=choice)
    assert str(caught.value.param).startswith("tool_choice")


def test_the_async_client_runs_many_at_once(live: Live) -> None:
    async def one(client: AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=10, seed=seed, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def everything() -> list[str]:
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(12)), one(client, 0))

    texts = asyncio.run(everything())
    assert texts[0] == texts[-1]
    assert len(set(texts)) > 2
