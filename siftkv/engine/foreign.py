"""Calls into code that is not ours (tokenizers, grammars): what it asserts says nothing about this engine's books."""

from __future__ import annotations

from types import TracebackType

from siftkv.errors import LibraryFailed


class Foreign:
    """`with` one of these, assertions of `what`, and panics of its Rust parts, which are no `Exception`, become
    LibraryFailed. Other errors pass. Cheap enough for every token.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, AssertionError):
            raise LibraryFailed(f"an assertion of {self._what} failed: {error}") from error
        if kind is not None and kind.__module__ == "pyo3_runtime":
            raise LibraryFailed(f"{self._what} panicked: {error}") from error


TOKENIZER, GRAMMAR = Foreign("the tokenizer"), Foreign("the grammar")
