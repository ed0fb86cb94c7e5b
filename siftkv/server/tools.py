"""Tool calls in a model's text, whole or as it comes.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen), or the bare JSON object at the start of the
answer (Llama 3, there `parameters`).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
_ARGUMENTS = ("arguments", "parameters")
_BETWEEN = " \n\t;,"
"""What may stand between two calls."""


class CallReader:
    """Reads one call's JSON object character by character, so that arguments can be passed on as they come.

    done: the object is complete. failed: it is not a call. name: once it is known.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.done = False
        self.failed = False
        self._expects = "open"
        self._key = ""
        self._value = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments = ""
        self._taken = 0

    def feed(self, text: str) -> str:
        """Read on, and return what stands behind the object's end."""
        for i, char in enumerate(text):
            if self.done or self.failed:
                return text[i:]
            self.raw += char
            self._read(char)
        return ""

    def take(self) -> str:
        """Text of the arguments since the last call; at the end `{}` for a call without any."""
        if self.done and not self._arguments:
            self._arguments = "{}"
        new = self._arguments[self._taken :]
        self._taken = len(self._arguments)
        return new

    def _read(self, char: str) -> None:
        if self._expects == "value":
            self._read_value(char)
        elif self._expects == "key" and (self._in_string or char == '"'):
            self._read_key(char)
        elif char.isspace():
            return
        elif (self._expects, char) == ("open", "{"):
            self._expects = "key"
        elif (self._expects, char) == ("colon", ":"):
            self._expects, self._value, self._depth = "value", "", 0
        elif (self._expects, char) == ("next", ","):
            self._expects = "key"
        elif (self._expects, char) == ("next", "}"):
            self.done, self.failed = self.name is not None, self.name is None
        else:
            self.failed = True

    def _read_key(self, char: str) -> None:
        if char == '"' and not self._in_string:
            self._in_string, self._key = True, ""
        elif char == '"':
            self._in_string, self._expects = False, "colon"
        else:
            self._key += char

    def _read_value(self, char: str) -> None:
        if not self._value and char.isspace():
            return
        scalar = bool(self._value) and not self._in_string and self._depth == 0
        if scalar and (char in ",}" or char.isspace()):
            self._end_value()
            self._read(char)
            return
        self._value += char
        if self._key in _ARGUMENTS and self._value[0] != '"':
            self._arguments += char
        self._track(char)
        if self._depth == 0 and not self._in_string and char in '"}]':
            self._end_value()

    def _track(self, char: str) -> None:
        """Depth, and whether the next character is inside a string."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _end_value(self) -> None:
        self._expects = "next"
        try:
            value = json.loads(self._value)
        except ValueError:
            self.failed = True
            return
        if self._key == "name" and isinstance(value, str) and value:
            self.name = value
        elif self._key == "name":
            self.failed = True
        elif self._key in _ARGUMENTS and isinstance(value, str):  # some models write the object as a string
            self._arguments += value


@dataclass
class ToolDelta:
    """What a piece of text adds to a tool call: its name first, then its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class ToolNews:
    """What a piece of text adds to an answer."""

    content: str = ""
    calls: list[ToolDelta] = field(default_factory=list)


class ToolStream:
    """Splits the text of one answer into content and tool calls.

    names: of the tools that the model was told of; only those make a call of a bare JSON object. most: calls that are
    taken; the text of further ones is dropped.
    """

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        self._names = frozenset(names)
        self._most = most
        self._buffer = ""
        self._reader: CallReader | None = None
        self._tagged = False
        self._named = False
        self._started = False
        self.count = 0
        """Calls so far."""

    def feed(self, text: str) -> ToolNews:
        """Take the next piece of text."""
        news = ToolNews()
        self._buffer += text
        while self._step(news):
            pass
        return news

    def finish(self) -> ToolNews:
        """The text has ended: what was held back."""
        news = ToolNews()
        if self._reader is not None and not self._named:
            self._give_up(news, self._reader)
        news.content += self._buffer if self._started or not self.count else self._buffer.strip(_BETWEEN)
        self._buffer = ""
        return news

    def _step(self, news: ToolNews) -> bool:
        """Consume what can be told; false when more text is needed."""
        return self._read_call(news) if self._reader is not None else self._read_text(news)

    def _read_text(self, news: ToolNews) -> bool:
        bare = self._buffer.lstrip(_BETWEEN if self.count else None)
        if not self._started and bare.startswith("{"):
            return self._open(bare, tagged=False)
        place = self._buffer.find(OPEN_TAG)
        end = place if place >= 0 else len(self._buffer) - _possible_start(self._buffer)
        content = self._buffer[:end].rstrip() if bare else ""
        if content:
            self._say(news, content)
            self._buffer = self._buffer[len(content) :]
        return place >= 0 and self._open(self._buffer[place - len(content) + len(OPEN_TAG) :], tagged=True)

    def _say(self, news: ToolNews, content: str) -> None:
        news.content += content
        self._started = True

    def _open(self, rest: str, tagged: bool) -> bool:
        self._reader, self._tagged, self._named, self._buffer = CallReader(), tagged, False, rest
        return True

    def _read_call(self, news: ToolNews) -> bool:
        reader = self._reader
        assert reader is not None
        self._buffer = reader.feed(self._buffer)
        known = reader.name is not None and (self._tagged or reader.name in self._names)
        if known and not self._named:
            self._named = True
            self.count += 1
            self._add(news, ToolDelta(self.count - 1, reader.name))
        if self._named:
            arguments = reader.take()
            if arguments:
                self._add(news, ToolDelta(self.count - 1, None, arguments))
        if reader.failed or (reader.name is not None and not known):
            self._give_up(news, reader)
            return True
        return reader.done and self._close()

    def _close(self) -> bool:
        """Behind a complete call: its closing tag is dropped. False while that is not here."""
        if self._tagged:
            rest = self._buffer.lstrip()
            if not rest.startswith(CLOSE_TAG) and CLOSE_TAG.startswith(rest):
                return False
            self._buffer = rest.removeprefix(CLOSE_TAG)
        self._reader, self._started = None, False
        return True

    def _give_up(self, news: ToolNews, reader: CallReader) -> None:
        """What was read is no call: it is content, unless its beginning has been passed on as a call."""
        if not self._named:
            self._say(news, (OPEN_TAG if self._tagged else "") + reader.raw)
        self._reader, self._started = None, True

    def _add(self, news: ToolNews, delta: ToolDelta) -> None:
        if self._most is None or delta.index < self._most:
            news.calls.append(delta)


def _possible_start(text: str) -> int:
    """Length of the end of a text that the opening tag may begin with."""
    return next((n for n in range(min(len(text), len(OPEN_TAG) - 1), 0, -1) if OPEN_TAG.startswith(text[-n:])), 0)
