"""A chat completion from what the engine gives: whole, or as chunks."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from siftkv.engine.outputs import CompletionOutput, StreamChunk, TokenLogprob
from siftkv.server.answers import chat_logprobs
from siftkv.server.renderer import Renderer
from siftkv.server.tools import ToolDelta, ToolStream


class ChatAnswer:
    """One response of `/v1/chat/completions`.

    head: the fields id, created and model. tools: names of the tools whose calls are looked for, None = no tools.
    most_calls: calls that an answer may have.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        head: Mapping[str, Any],
        renderer: Renderer,
        n: int,
        tools: Sequence[str] | None = None,
        most_calls: int | None = None,
    ) -> None:
        self.head = dict(head)
        self._renderer = renderer
        self._most_calls = most_calls
        self._tool_names = tools
        self._choices = [_Choice(self._tool_stream()) for _ in range(n)]

    def _tool_stream(self) -> ToolStream | None:
        return None if self._tool_names is None else ToolStream(self._tool_names, self._most_calls)

    def opening(self) -> Iterator[dict[str, Any]]:
        """The choices of a stream's first chunks."""
        for index in range(len(self._choices)):
            yield _choice(index, {"role": "assistant", "content": ""})

    def chunk(self, place: int, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The choices that a step's chunk adds to a stream: one for content, one a piece of a tool call, and one for
        the end.
        """
        choice, index = self._choices[chunk.index], chunk.index
        choice.logprobs += chunk.logprobs or ()
        for delta in choice.deltas(chunk):
            yield _choice(index, delta, logprobs=self._take(choice))
        if chunk.finish_reason is not None:
            yield _choice(index, {}, choice.finish_reason(chunk.finish_reason), self._take(choice), _stop_reason(chunk))

    def _take(self, choice: _Choice) -> dict[str, Any] | None:
        """Log-probabilities of the tokens since the last chunk that was sent."""
        logprobs, choice.logprobs = choice.logprobs, []
        return chat_logprobs(logprobs, self._renderer) if logprobs else None

    def choice(self, place: int, output: CompletionOutput) -> dict[str, Any]:
        """A choice of the whole response."""
        stream = self._tool_stream()
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        reason: str | None = output.finish_reason
        if stream is not None:
            news, rest = stream.feed(output.text), stream.finish()
            message["content"] = news.content + rest.content
            if stream.count:
                message["tool_calls"] = _whole_calls([*news.calls, *rest.calls])
                message["content"] = message["content"].strip() or None
                reason = "tool_calls" if reason == "stop" else reason
        logprobs = None if output.logprobs is None else chat_logprobs(output.logprobs, self._renderer)
        return {
            "index": output.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }


class _Choice:
    """Where one choice of a stream stands."""

    def __init__(self, tools: ToolStream | None) -> None:
        self.logprobs: list[TokenLogprob] = []
        self._tools = tools

    def deltas(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        if self._tools is None:
            if chunk.text:
                yield {"content": chunk.text}
            return
        news = [self._tools.feed(chunk.text)]
        if chunk.finish_reason is not None:
            news.append(self._tools.finish())
        for part in news:
            if part.content:
                yield {"content": part.content}
            for call in part.calls:
                yield {"tool_calls": [_call_delta(call)]}

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if self._tools is not None and self._tools.count and reason == "stop" else reason


def _choice(
    index: int,
    delta: dict[str, Any],
    finish_reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason} | (extra or {})


def _stop_reason(chunk: StreamChunk) -> dict[str, Any]:
    return {"stop_reason": chunk.output.stop_reason if chunk.output is not None else None}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _call_delta(call: ToolDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": _call_id(), "type": "function", "function": function}


def _whole_calls(deltas: Sequence[ToolDelta]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls[delta.index] = {"id": _call_id(), "type": "function", "function": function}
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return list(calls.values())
