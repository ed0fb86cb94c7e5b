"""A text completion from what the engine gives: whole, or as chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from siftkv.engine.outputs import CompletionOutput, StreamChunk, TokenLogprob
from siftkv.server.answers import completion_logprobs
from siftkv.server.renderer import Renderer


class TextAnswer:
    """One response of `/v1/completions`; its choices are n a prompt, in the order of the prompts.

    head: the fields id, created and model.
    """

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, head: Mapping[str, Any], renderer: Renderer, n: int) -> None:
        self.head = dict(head)
        self._renderer = renderer
        self._n = n
        self._logprobs: dict[int, list[TokenLogprob]] = defaultdict(list)
        self._offsets: dict[int, int] = defaultdict(int)

    def opening(self) -> Iterator[dict[str, Any]]:
        return iter(())

    def chunk(self, place: int, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The choice that a step's chunk adds to a stream; none while its text is held back."""
        index = place * self._n + chunk.index
        if chunk.logprobs:
            self._logprobs[index] += chunk.logprobs
        if chunk.text or chunk.finish_reason is not None:
            stop_reason = chunk.output.stop_reason if chunk.output is not None else None
            yield {
                "index": index,
                "text": chunk.text,
                "logprobs": self._take(index),
                "finish_reason": chunk.finish_reason,
                "stop_reason": stop_reason,
            }

    def _take(self, index: int) -> dict[str, Any] | None:
        logprobs = self._logprobs.pop(index, None)
        if not logprobs:
            return None
        report, self._offsets[index] = completion_logprobs(logprobs, self._renderer, self._offsets[index])
        return report

    def choice(self, place: int, output: CompletionOutput) -> dict[str, Any]:
        """A choice of the whole response."""
        report = None if output.logprobs is None else completion_logprobs(output.logprobs, self._renderer, 0)[0]
        return {
            "index": place * self._n + output.index,
            "text": output.text,
            "logprobs": report,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
