"""Text from a stream of tokens: whole characters only, and never a piece of a stop string."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from siftkv.engine.foreign import TOKENIZER

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 5
# A UTF-8 character has at most 4 bytes and a token at least one: 4 tokens without text will never become a character.
MAX_STALLED_TOKENS = 4


class Decoder(Protocol):
    """The one method used of a `transformers` tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


class IncrementalDetokenizer:
    """Turns the tokens of one completion into text as they come, at a bounded cost a token.

    Only a small window of recent tokens is decoded each time: a token's text depends on its neighbours (a
    character may be spread over tokens, a leading space may belong to a word), so that the window starts one
    emitted step before the new tokens and the text already seen is cut off. This is what vLLM and
    text-generation-inference do; `tokenizers.DecodeStream` is not used because it needs a fast tokenizer and
    fails on byte sequences that are no UTF-8.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._whole_context(list(prompt_ids[-CONTEXT_TOKENS:]))
        self._context = len(self._window)
        self._seen = self._decode(self._window)
        self._stalled = 0

    def append(self, token_id: int) -> str:
        """Take the next token and return the text that it completes, often its own, "" inside a character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        self._stalled += 1
        whole = text.rstrip(REPLACEMENT)
        new = self._unseen(whole)
        gave_up = not new and self._stalled >= MAX_STALLED_TOKENS
        if gave_up:
            # Only the last replacement character can still become a real one.
            whole = text.removesuffix(REPLACEMENT)
            new = self._unseen(whole)
        if new:
            self._seen = whole
            self._stalled = 0
        if gave_up or (new and whole == text):
            self._advance(pending=text[len(whole) :])
        elif text == self._seen and not text.endswith(REPLACEMENT):
            # A skipped special token: without it the window keeps the context that the next word's space needs.
            self._window.pop()
            self._stalled = 0
        return new

    def flush(self) -> str:
        """Return what was held back, with a replacement character for an incomplete one. Call it once, at the end."""
        text = self._decode(self._window)
        new = self._unseen(text)
        self._seen = text
        return new

    def _decode(self, token_ids: list[int]) -> str:
        with TOKENIZER:
            return self._tokenizer.decode(
                token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
            )

    def _whole_context(self, token_ids: list[int]) -> list[int]:
        """Without the end of a character that began further to the left: it may spoil what follows it."""
        starts = range(min(len(token_ids), MAX_STALLED_TOKENS))
        return next((c for c in (token_ids[s:] for s in starts) if self._decode(c)[:1] != REPLACEMENT), token_ids)

    def _unseen(self, text: str) -> str:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._seen, text)))
        # Seen replacement characters may turn into the real one; other seen text that changed cannot be taken back.
        return text[common:] if common >= len(self._seen.rstrip(REPLACEMENT)) else ""

    def _advance(self, pending: str) -> None:
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._seen = self._decode(self._window).removesuffix(pending)
        self._stalled = 0


class StopChecker:
    """Releases a growing text up to the first stop string, and holds back what may become one.

    The first stop string to be complete ends the text, the longest if several end at the same character; so
    how the text is cut into pieces does not change the result.
    """

    def __init__(self, stop: Sequence[str] = (), include_stop_str_in_output: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._tail = ""
        self.pieces: list[str] = []
        """All text released so far."""
        self.stop_reason: str | None = None
        """The stop string that was found; None as long as there was none."""

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self.pieces)

    def append(self, piece: str, may_stop: bool = True) -> str:
        """Take the next piece of text and return what can be shown now; then look at `stop_reason`.

        With `may_stop` false (fewer than `min_tokens` tokens) a stop string that ends in the piece is plain text.
        """
        assert self.stop_reason is None, "text after a stop string"
        old, buffer = self._tail, self._tail + piece
        match = self._first_match(buffer, len(old)) if may_stop else None
        # The tail holds text back only if a stop string must not be shown.
        released = len(old) if self._include else 0
        if match is not None:
            end, start, self.stop_reason = match
            self._tail = ""
            return self._release(buffer[released : end if self._include else start])
        self._tail = self._possible_start(buffer)
        return self._release(buffer[released : len(buffer) if self._include else len(buffer) - len(self._tail)])

    def close(self, rest: str = "", may_stop: bool = True) -> str:
        """End the text for another reason: take its `rest` (the detokenizer's `flush()`), release what was held back.

        `rest` may still complete a stop string; look at `stop_reason`.
        """
        released = self.append(rest, may_stop)
        held, self._tail = self._tail, ""
        return released if self._include else released + self._release(held)

    def _release(self, piece: str) -> str:
        self.pieces.append(piece)
        return piece

    def _first_match(self, buffer: str, old: int) -> tuple[int, int, str] | None:
        """(end, start, stop string) of the match that ends first, among those that end after `old` characters."""
        starts = ((buffer.find(stop, max(0, old - len(stop) + 1)), stop) for stop in self._stop)
        return min(((start + len(stop), start, stop) for start, stop in starts if start >= 0), default=None)

    def _possible_start(self, buffer: str) -> str:
        """The longest end of `buffer` that a stop string begins with, but is longer than."""
        longest = max((len(stop) for stop in self._stop), default=0) - 1
        for start in range(max(0, len(buffer) - longest), len(buffer)):
            end = buffer[start:]
            if any(len(end) < len(stop) and stop.startswith(end) for stop in self._stop):
                return end
        return ""
