"""How a request wants its tokens chosen. Names and meanings are vLLM's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import cast

from siftkv.engine.guide import Guide
from siftkv.errors import RequestError

GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
MAX_BIAS = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Immutable and hashable once checked.

    Raises `RequestError` when a value has the wrong type or is out of its range.
    """

    n: int = 1
    """Completions of the prompt; with a seed, each completion draws from its own stream."""
    temperature: float = 1.0
    """Divides the logits. Below 1e-5 the choice is greedy: the likeliest token, ties to the lowest id."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this sum, in (0, 1]; 1 = off."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 or -1 = off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability, in [0, 1]; 0 = off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of the tokens in prompt and output, in [0.01, 100]; 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the output has it, in [-2, 2]."""
    seed: int | None = None
    """In [0, 2**63): the same request draws the same numbers whatever runs beside it. None = a random seed."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output; kept as a tuple (read it as `stop_strings`)."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, besides the model's end tokens; kept as a tuple."""
    max_tokens: int | None = 16
    """Tokens to generate at most; None = up to the context limit."""
    min_tokens: int = 0
    """Until the output has this many tokens, end and stop tokens are banned and stop strings are not looked for."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    logprobs: int | None = None
    """Likeliest tokens reported with each generated one, 0 to 20; 0 = only the chosen token, None = no report."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the output in its text."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    """Added to the logits of these token ids, -100 to 100; kept as a tuple of pairs (read it as `biases`)."""
    guide: Guide | None = None
    """Restricts the output to a grammar, see `siftkv.engine.grammar`; None = any token may come."""
    priority: int = 0
    """Of the requests that wait, those with the lowest number start first; equal ones in order of arrival."""

    def __post_init__(self) -> None:
        self._check_shaping()
        self._check_lengths()
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _biases(self.logit_bias))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}.")

    def _check_shaping(self) -> None:
        self._number("temperature", "a finite number of 0 or more", lambda x: x >= 0)
        self._number("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1)
        self._integer("top_k", "a whole number of -1 or more (0 or -1 turns it off)", lambda x: x >= -1)
        self._number("min_p", "between 0 and 1", lambda x: 0 <= x <= 1)
        self._number("repetition_penalty", "between 0.01 and 100 (1 turns it off)", lambda x: 0.01 <= x <= 100)
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, "between -2 and 2", lambda x: -2 <= x <= 2)
        if self.seed is not None:
            self._integer("seed", "a whole number from 0 to 2**63 - 1, or None", lambda x: 0 <= x < 2**63)

    def _check_lengths(self) -> None:
        self._integer("n", "a whole number of 1 or more", lambda x: x >= 1)
        if self.max_tokens is not None:
            self._integer("max_tokens", "a whole number of 1 or more, or None (no limit)", lambda x: x >= 1)
        self._integer("min_tokens", "a whole number of 0 or more", lambda x: x >= 0)
        self._integer("priority", "a whole number", lambda x: True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).")
        if self.logprobs is not None:
            self._integer("logprobs", f"from 0 to {MAX_LOGPROBS}, or None", lambda x: 0 <= x <= MAX_LOGPROBS)

    def _number(self, name: str, rule: str, valid: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        number = _as_float(value)
        if not math.isfinite(number) or not valid(number):
            raise RequestError(f"{name} must be {rule}, not {value!r}.")
        self._set(name, number)

    def _integer(self, name: str, rule: str, valid: Callable[[int], bool]) -> None:
        value = getattr(self, name)
        if not _is_integer(value) or not valid(int(value)):
            raise RequestError(f"{name} must be {rule}, not {value!r}.")
        self._set(name, int(value))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it was normalised: a tuple, empty when there is none."""
        return cast(tuple[str, ...], self.stop)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it was normalised: (token id, bias) pairs by token id, empty when there are none."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether tokens already seen change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def adjusts(self) -> bool:
        """Whether anything but `min_tokens` changes the logits before the choice: penalties, biases or a guide."""
        return self.penalised or bool(self.biases) or self.guide is not None


def _as_float(value: object) -> float:
    """NaN for what is no number, and for integers beyond float's range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) for item in strings):
        raise RequestError(f"{name} must be a string or a list of strings, not {value!r}.")
    if "" in strings:
        raise RequestError(f"{name} must not contain an empty string: it would end every output at once.")
    return tuple(strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not all(_is_integer(item) and item >= 0 for item in value):
        raise RequestError(f"{name} must be a list of token ids (whole numbers of 0 or more), not {value!r}.")
    return tuple(int(item) for item in value)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else [] if value is None else value
    if isinstance(pairs, Sequence) and all(_is_bias(pair) for pair in pairs):
        return tuple(sorted({int(token): float(bias) for token, bias in pairs}.items()))
    raise RequestError(f"logit_bias must map token ids to numbers between -100 and 100, not {str(value)[:80]!r}.")


def _is_bias(pair: object) -> bool:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        return False
    token, bias = pair
    return _is_integer(token) and token >= 0 and abs(_as_float(bias)) <= MAX_BIAS
