"""Text to tokens and back, on a tokenizer of the server's own: the engine's thread uses the model's."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from siftkv.engine.grammar import GrammarCompiler
from siftkv.engine.llm import LLM
from siftkv.errors import RequestError

T = TypeVar("T")


class Renderer:
    """Templates, tokenizer and grammars of one model.

    Its methods may take as long as a prompt is long, or a grammar is complex; `run` calls them in a thread.
    """

    def __init__(self, llm: LLM) -> None:
        self.tokenizer = copy.deepcopy(llm.tokenizer)
        self.vocab_size = llm.model.config.vocab_size
        self._eos_token_ids = llm.model.config.eos_token_ids
        self.longest_text = llm.engine.max_model_len * max(map(len, self.tokenizer.get_vocab()))
        """Characters above which no text fits the context."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="siftkv-tokenizer")
        self.token_text = lru_cache(1 << 16)(self._token_text)
        """Text of one token id; a piece of a character is a replacement character."""

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function in the renderer's thread, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Made at the first use; raises RequestError where the tokenizer does not allow it."""
        return GrammarCompiler(self.tokenizer, self.vocab_size, self._eos_token_ids)

    @property
    def template(self) -> str:
        """The chat template, "" where there is none."""
        template: Any = getattr(self.tokenizer, "chat_template", None) or ""
        return str(template.get("tool_use", template.get("default", "")) if isinstance(template, dict) else template)

    @property
    def knows_tools(self) -> bool:
        return "tools" in self.template

    def chat(self, messages: Sequence[dict[str, Any]], /, **settings: Any) -> str:
        """The text of a conversation in the model's template. settings: tools, add_generation_prompt and what else the
        template understands. Raises RequestError for a model without a template, or messages that it refuses.
        """
        if not self.template:
            raise RequestError("the model has no chat template: send its messages as a prompt to /v1/completions")
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **settings))
        except Exception as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises RequestError for one with half characters, which JSON can carry, and for one that
        is too long for the context whatever its tokens are: megabytes would keep everybody waiting for this thread.
        """
        if len(text) > self.longest_text:
            raise RequestError(
                f"the prompt has {len(text)} characters: no text above {self.longest_text} fits the context"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is no Unicode text: it has half a character at {error.start}") from error
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Raises RequestError for ids outside the vocabulary."""
        wrong = [t for t in token_ids if not 0 <= t < self.vocab_size]
        if wrong:
            raise RequestError(f"token id {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def _token_text(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
