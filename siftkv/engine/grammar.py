"""Grammars as guides of the sampler, through llguidance: JSON, JSON schemas, regular expressions, choices and Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch
from torch import Tensor

from siftkv.engine.foreign import GRAMMAR
from siftkv.errors import RequestError

# Unbounded white space lets a weak model fill its whole budget with it.
_WHITESPACE = r"[ \n\t]{0,24}"
# A mask is computed in the thread that serves everybody: at llguidance's own limits one of them may take seconds.
_LIMITS = llguidance.LLParserLimits(
    max_grammar_size=20_000,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
_LONGEST = 1 << 16
"""Characters of a grammar: compiling takes time with their square."""


class GrammarState:
    """One completion's place in a grammar; see `siftkv.engine.guide.GuideState`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._consumed = 0
        self._error: Exception | None = None

    @property
    def failure(self) -> str | None:
        return _reason(self._matcher) if self._matcher.is_error() else None

    def allowed(self, output_ids: Sequence[int], vocab: int) -> Tensor:
        if self._error is not None:  # how far the matcher came is not known: text that it does not allow might follow
            raise self._error
        try:
            with GRAMMAR:  # in here, for a panic is no Exception
                return self._allowed(output_ids, vocab)
        except Exception as error:
            self._error = error
            raise

    def _allowed(self, output_ids: Sequence[int], vocab: int) -> Tensor:
        new = list(output_ids[self._consumed :])
        self._consumed = len(output_ids)
        if (new and not self._matcher.consume_tokens(new)) or self._matcher.is_error():
            return torch.zeros(vocab, dtype=torch.bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():  # a limit of the parser was met while the mask was computed
            return torch.zeros(vocab, dtype=torch.bool)
        allowed = np.zeros(vocab, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little", count=min(vocab, 8 * len(bits)))
        allowed[: len(known)] = known
        return torch.from_numpy(allowed)


class Grammar:
    """A compiled grammar over one tokenizer; see `siftkv.engine.guide.Guide`."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def start(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles grammars for one model. Building one takes about half a second for a large vocabulary.

    Raises RequestError for a tokenizer that llguidance cannot read.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(
                tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
            )
        except Exception as error:
            raise RequestError(f"this model's tokenizer cannot be guided by a grammar: {error}") from error

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any]) -> Grammar:
        """JSON that a schema allows. Raises RequestError for a schema that is wrong or uses what is not supported."""
        return self._checked(json_grammar(schema), "JSON schema")

    def regex(self, pattern: str) -> Grammar:
        """Text that a regular expression (Rust's syntax) matches as a whole. Raises RequestError for a wrong one."""
        return self._checked(llguidance.LLMatcher.grammar_from_regex(pattern), "regular expression")

    def choice(self, options: Sequence[str]) -> Grammar:
        """One of several texts."""
        if not options:
            raise RequestError("a choice needs at least one option")
        told = [json.dumps(option, ensure_ascii=False) for option in options if option]
        # A terminal may have thousands of branches, a rule may not; but it cannot be empty.
        start = " | ".join(["CHOICE"] * bool(told) + ['""'] * ("" in options))
        return self.lark(f"start: {start}\n" + (f"CHOICE: {' | '.join(told)}" if told else ""))

    def lark(self, grammar: str) -> Grammar:
        """A grammar in llguidance's variant of Lark's syntax. Raises RequestError for a wrong one."""
        return self._checked(llguidance.LLMatcher.grammar_from_lark(grammar), "grammar")

    def _checked(self, grammar: str, what: str) -> Grammar:
        if len(grammar) > _LONGEST:
            raise RequestError(f"the {what} cannot be used: as a grammar it has more than {_LONGEST} characters")
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is too complex for the first token shows here, not in the engine
        if matcher.is_error():
            raise RequestError(f"the {what} cannot be used: {_reason(matcher)}")
        return Grammar(matcher)


def _reason(matcher: llguidance.LLMatcher) -> str:
    return (matcher.get_error().strip().splitlines() or ["the parser gave up"])[0]


def json_grammar(schema: Mapping[str, Any]) -> str:
    """llguidance's grammar of a JSON schema, with bounded white space."""
    return llguidance.LLMatcher.grammar_from_json_schema(dict(schema), defaults={"whitespace_pattern": _WHITESPACE})
