"""Which grammar a request asks for."""

from __future__ import annotations

import json
from typing import Any

from siftkv.engine.grammar import Grammar, GrammarCompiler
from siftkv.errors import RequestError
from siftkv.server.chat import active_tools
from siftkv.server.errors import ApiError
from siftkv.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    Tool,
)
from siftkv.server.renderer import Renderer
from siftkv.server.tools import CLOSE_TAG, OPEN_TAG

_WHITESPACE = r"[ \n\t]{0,8}"


def guide_for(body: ChatCompletionRequest | CompletionRequest, renderer: Renderer) -> Grammar | None:
    """The grammar of `response_format`, `structured_outputs` or a required tool call. Raises ApiError for a wrong one.

    Takes milliseconds to a second: call it in the renderer's thread.
    """
    if isinstance(body, ChatCompletionRequest):
        tools = _required(body)
        if tools:
            return _compile("tool_choice", lambda g: g.lark(tool_grammar(tools, body, renderer)), renderer)
    if body.structured_outputs is not None:
        outputs = body.structured_outputs
        return _compile("structured_outputs", lambda g: _structured(g, outputs), renderer)
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    return _compile("response_format", lambda g: _response(g, asked), renderer)


def _compile(field: str, make: Any, renderer: Renderer) -> Grammar:
    try:
        grammar: Grammar = make(renderer.grammars)
        return grammar
    except RecursionError as error:
        raise ApiError(400, "the JSON is nested too deeply", field, "invalid_grammar") from error
    except (RequestError, ValueError) as error:
        raise ApiError(400, str(error), field, "invalid_grammar") from error


def _response(grammars: GrammarCompiler, asked: ResponseFormat) -> Grammar:
    if asked.type == "json_object":
        return grammars.json_object()
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise ApiError(400, "a response_format of type json_schema needs json_schema.schema", "response_format")
    return grammars.json_schema(asked.json_schema.schema_)


def _structured(grammars: GrammarCompiler, asked: StructuredOutputs) -> Grammar:
    given = [name for name, value in asked if value not in (None, False)]
    if len(given) != 1:
        raise RequestError("structured_outputs needs exactly one of json, json_object, regex, choice and grammar")
    if asked.json_ is not None:
        schema = json.loads(asked.json_) if isinstance(asked.json_, str) else asked.json_
        if not isinstance(schema, dict):
            raise RequestError("structured_outputs.json must be a JSON schema, an object")
        return grammars.json_schema(schema)
    if asked.regex is not None:
        return grammars.regex(asked.regex)
    if asked.choice is not None:
        return grammars.choice(asked.choice)
    return grammars.json_object() if asked.grammar is None else grammars.lark(asked.grammar)


def _required(body: ChatCompletionRequest) -> list[Tool]:
    """The tools of which one must be called; none where that is the model's choice."""
    choice, tools = body.tool_choice, active_tools(body)
    if choice == "required" and not tools:
        raise ApiError(400, "tool_choice=required needs tools", "tool_choice", "invalid_value")
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise ApiError(400, f"tool_choice names {choice.function.name!r}, which is not in tools", "tool_choice")
        return named
    return tools if choice == "required" else []


def tool_grammar(tools: list[Tool], body: ChatCompletionRequest, renderer: Renderer) -> str:
    """A Lark grammar of calls in the form that the model's template shows."""
    key = "parameters" if OPEN_TAG not in renderer.template and '"parameters"' in renderer.template else "arguments"
    calls = [_call_schema(tool, key) for tool in tools]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    body_rule = f"call: %json {json.dumps(schema | {'x-guidance': {'whitespace_pattern': _WHITESPACE}})}"
    if OPEN_TAG not in renderer.template:
        return f"start: call\n{body_rule}"
    several = isinstance(body.tool_choice, str) and body.parallel_tool_calls is not False
    start = 'start: tagged ("\\n" tagged)*' if several else "start: tagged"
    return f'{start}\ntagged: "{OPEN_TAG}\\n" call "\\n{CLOSE_TAG}"\n{body_rule}'


def _call_schema(tool: Tool, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, key: tool.function.parameters or {"type": "object"}},
        "required": ["name", key],
        "additionalProperties": False,
    }
