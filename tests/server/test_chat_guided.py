"""Structured output and tool calls through the `openai` client."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from openai import BadRequestError, OpenAI

from tests.server.live import MODEL, Live, byte_llm

HELLO: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def client(live: Live) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


class TestStructured:
    SCHEMA: ClassVar[Any] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }

    @pytest.mark.parametrize("seed", range(3))
    def test_json_schema(self, client: OpenAI, seed: int) -> None:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=300,
            seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": self.SCHEMA}},
        )
        assert answer.choices[0].finish_reason == "stop"
        person = json.loads(answer.choices[0].message.content or "")
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)

    def test_parsed_by_the_client(self, client: OpenAI) -> None:
        from pydantic import BaseModel, Field

        class Pair(BaseModel):
            flag: bool
            size: int = Field(ge=0, le=9)

        answer = client.chat.completions.parse(
            model=MODEL, messages=HELLO, max_tokens=300, seed=1, response_format=Pair
        )
        assert isinstance(answer.choices[0].message.parsed, Pair)

    def test_n_completions_walk_the_grammar_each_for_itself(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, n=4, seed=2, extra_body={"structured_outputs": {"regex": "[ab]{6}c"}}
        )
        texts = [choice.message.content or "" for choice in answer.choices]
        assert all(len(t) == 7 and set(t[:6]) <= set("ab") and t[6] == "c" for t in texts)
        assert len(set(texts)) > 1

    def test_json_object_begins_one(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=3, response_format={"type": "json_object"}
        )
        assert (answer.choices[0].message.content or "").startswith("{")

    @pytest.mark.parametrize(
        ("extra", "param"),
        [
            ({"response_format": {"type": "json_schema"}}, "response_format"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}},
                "response_format",
            ),
            ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
            ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
            ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ],
    )
    def test_wrong_grammars_are_refused(self, client: OpenAI, extra: dict[str, Any], param: str) -> None:
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra)
        assert caught.value.param == param


class TestTools:
    def call(self, client: OpenAI, **settings: Any) -> Any:
        return client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[WEATHER, CLOCK], max_tokens=300, **settings
        )

    def said(self, text: str) -> dict[str, Any]:
        """Settings that make the model say a text."""
        return {"extra_body": {"structured_outputs": {"choice": [text]}}}

    def test_a_named_tool_is_called_with_its_schema(self, client: OpenAI) -> None:
        choice = self.call(client, seed=1, tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0]
        [call] = choice.message.tool_calls
        assert call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        assert arguments["town"] in ("Rome", "Oslo")
        assert 1 <= arguments["days"] <= 9
        assert choice.message.content is None
        assert choice.finish_reason == "tool_calls"

    def test_a_required_call_streams(self, client: OpenAI) -> None:
        settings: Any = {"seed": 3, "tool_choice": "required", "parallel_tool_calls": False}
        [whole] = self.call(client, **settings).choices[0].message.tool_calls
        name, arguments, ids, reasons, pieces = "", "", [], [], 0
        for chunk in self.call(client, **settings, stream=True):
            for choice in chunk.choices:
                reasons += [choice.finish_reason] if choice.finish_reason else []
                assert not choice.delta.content
                for call in choice.delta.tool_calls or ():
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
                    ids += [call.id] if call.id else []
                    pieces += 1
        assert (name, arguments) == (whole.function.name, whole.function.arguments)
        assert len(ids) == 1
        assert reasons == ["tool_calls"]
        assert pieces > 1

    def test_calls_are_found_in_free_text(self, client: OpenAI) -> None:
        text = 'So: <tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
        message = self.call(client, **self.said(text)).choices[0].message
        assert message.content == "So:"
        assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [("clock", "{}")]

    def test_without_a_call_the_text_stays(self, client: OpenAI) -> None:
        choice = self.call(client, **self.said("1 < 2 <tool")).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
            "1 < 2 <tool",
            None,
            "stop",
        )

    def test_none_leaves_tools_out(self, client: OpenAI) -> None:
        text = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
        message = self.call(client, tool_choice="none", **self.said(text)).choices[0].message
        assert (message.content, message.tool_calls) == (text, None)

    def test_a_conversation_with_results_goes_on(self, client: OpenAI) -> None:
        calls: Any = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Rome"}'}}]
        messages: Any = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=2)
        assert answer.choices[0].finish_reason == "length"

    def test_unknown_names_and_templates_without_tools_are_refused(self, client: OpenAI) -> None:
        with pytest.raises(BadRequestError, match="not in tools"):
            self.call(client, tool_choice={"type": "function", "function": {"name": "nothing"}})
        plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
        server = Live(byte_llm(template=plain)).ready()
        try:
            answer = server.post("/v1/chat/completions", {"messages": HELLO, "tools": [CLOCK]})
        finally:
            server.close()
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
