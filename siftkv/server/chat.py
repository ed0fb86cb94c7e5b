"""Messages as a chat template wants them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from siftkv.server.errors import ApiError
from siftkv.server.protocol import ChatCompletionRequest, ContentPart, Message, Tool
from siftkv.server.renderer import Renderer

_RESERVED = {
    "self",
    "messages",
    "conversation",
    "chat_template",
    "tools",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
} | {
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "continue_final_message",
}
_ROLES = {"developer": "system", "function": "tool"}


def render(body: ChatCompletionRequest, renderer: Renderer) -> tuple[str, list[int]]:
    """Text and token ids of a conversation. Raises ApiError or RequestError, which name what is wrong."""
    final = bool(body.continue_final_message)
    if final and body.add_generation_prompt:
        raise ApiError(
            400, "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    settings = template_settings(body.chat_template_kwargs)
    settings["add_generation_prompt"] = not final if body.add_generation_prompt is None else body.add_generation_prompt
    if final:
        settings["continue_final_message"] = True
    tools = active_tools(body)
    if tools:
        settings["tools"] = [tool_schema(tool) for tool in tools]
    text = renderer.chat(plain_messages(body.messages), **settings)
    return text, renderer.encode(text, bool(body.add_special_tokens))


def template_settings(asked: dict[str, Any] | None) -> dict[str, Any]:
    """What a request hands to its model's template. Raises ApiError for what is not the template's."""
    wrong = _RESERVED & set(asked or ())
    if wrong:
        raise ApiError(400, f"{wrong.pop()} cannot be set by a request", "chat_template_kwargs", "invalid_value")
    return dict(asked or {})


def active_tools(body: ChatCompletionRequest) -> list[Tool]:
    """The tools that the model is told of."""
    return [] if body.tool_choice == "none" else list(body.tools or ())


def tool_schema(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Content as one string, and the arguments of tool calls as objects. Raises ApiError for what is no text."""
    if not messages:
        raise ApiError(400, "messages must have at least one message", "messages", "invalid_value")
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Message, path: str) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role),
        "content": _text(message.content, f"{path}.content"),
    }
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            plain[field] = value
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{path}.tool_calls[{i}]"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _text(content: str | list[ContentPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            raise ApiError(
                400, f"a part of type {part.type!r} cannot be read: this server takes text", f"{path}[{i}].type"
            )
    return "\n".join(part.text or part.refusal or "" for part in content)


def _arguments(arguments: str | dict[str, Any], path: str) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ApiError(
            400, "arguments must be a JSON object, as a string", f"{path}.function.arguments", "invalid_value"
        )
    return parsed
