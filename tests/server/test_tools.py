"""Tool calls in a model's text, however it is cut into pieces."""

from __future__ import annotations

import json

import pytest

from siftkv.server.tools import ToolStream

Calls = list[tuple[str, str]]


def split(text: str, width: int, most: int | None = None) -> tuple[str, Calls]:
    stream, content, calls = ToolStream(["f", "g"], most), "", {}
    pieces = [text[i : i + width] for i in range(0, len(text), width)]
    for news in [*map(stream.feed, pieces), stream.finish()]:
        content += news.content
        for delta in news.calls:
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = (name + (delta.name or ""), arguments + delta.arguments)
    return content, list(calls.values())


TAGGED = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"</tool_call>", "b": [1, {"c": 2}]}}\n</tool_call>'
CASES: list[tuple[str, str, Calls]] = [
    (TAGGED, "", [("f", '{"a": "}\\"</tool_call>", "b": [1, {"c": 2}]}')]),
    (f'{TAGGED}\n<tool_call>{{"arguments": {{}}, "name": "g"}}</tool_call>', "", [*split(TAGGED, 99)[1], ("g", "{}")]),
    (
        'Let me see. <tool_call>{"name":"f","arguments":{"x":1}}</tool_call>',
        "Let me see.",
        [("f", '{"x":1}')],
    ),
    ('<tool_call>{"name":"f","arguments":"{\\"x\\":1}"}</tool_call>', "", [("f", '{"x":1}')]),
    ('<tool_call>{"name":"f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name":"f","arguments":{}} after', "after", [("f", "{}")]),
    (' {"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', "", [("f", '{"x": 1}'), ("g", "{}")]),
    ('{"answer": 42}', '{"answer": 42}', []),
    ('{"name": "Bob", "age": 5}', '{"name": "Bob", "age": 5}', []),
    ("a < b <tool", "a < b <tool", []),
    ("  text \n", "  text \n", []),
    ("<tool_call>none</tool_call> x", "<tool_call>none</tool_call> x", []),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ('<tool_call>{"name": "f", "arguments": {"a":', "", [("f", '{"a":')]),
    ('<tool_call>{"na', '<tool_call>{"na', []),
    ("", "", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=[case[0][:30] for case in CASES])
@pytest.mark.parametrize("width", [1, 2, 3, 7, 1000])
def test_pieces_make_no_difference(text: str, content: str, calls: Calls, width: int) -> None:
    assert split(text, width) == (content, calls)


def test_arguments_come_before_the_call_is_complete() -> None:
    stream = ToolStream(["f"])
    assert stream.feed('<tool_call>{"name": "f", "argu').calls[0].name == "f"
    [delta] = stream.feed('ments": {"text": "abc').calls
    assert delta.arguments == '{"text": "abc'
    [delta] = stream.feed('d"}}').calls
    assert delta.arguments == 'd"}'


def test_further_calls_are_dropped() -> None:
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert split(one * 3, 5, most=1) == ("", [("f", "{}")])


def test_arguments_are_json() -> None:
    for text, _, calls in CASES[:7]:
        for _, arguments in calls:
            assert isinstance(json.loads(arguments), dict), text
