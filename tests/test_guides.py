"""Guides, biases and priorities of requests."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from siftkv import SamplingParams
from siftkv.engine.grammar import GrammarCompiler
from siftkv.engine.pipeline import flies
from siftkv.engine.sampler import NonFiniteLogits, Sampler, SamplingRow
from siftkv.engine.scheduler import Scheduler
from siftkv.errors import RequestError
from tests.server.live import byte_llm, byte_tokenizer


class Allow:
    """A guide that allows a fixed set of tokens, and remembers what it was asked."""

    def __init__(self, *tokens: int, why: str | None = None) -> None:
        self.tokens = tokens
        self.why = why
        self.asked: list[list[int]] = []

    @property
    def failure(self) -> str | None:
        return self.why

    def start(self) -> Allow:
        return self

    def allowed(self, output_ids: Sequence[int], vocab: int) -> Tensor:
        self.asked.append(list(output_ids))
        mask = torch.zeros(vocab, dtype=torch.bool)
        mask[list(self.tokens)] = True
        return mask


def row(params: SamplingParams) -> SamplingRow:
    return SamplingRow(params, [1], [], (0,))


def test_a_guide_forbids_and_the_others_are_left_alone() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    plain = SamplingParams(temperature=0)
    rows = [row(plain), row(SamplingParams(temperature=0, guide=Allow(7, 9))), row(plain)]
    free = Sampler().sample(logits, [row(plain)] * 3).token_ids
    guided = Sampler().sample(logits, rows).token_ids
    assert guided[0] == free[0]
    assert guided[2] == free[2]
    assert guided[1] == (7 if logits[1, 7] > logits[1, 9] else 9)
    drawn = {Sampler().sample(logits, [row(SamplingParams(guide=Allow(3, 4)))] * 3).token_ids[0] for _ in range(30)}
    assert drawn == {3, 4}


def test_logprobs_stay_those_of_the_model() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    reports = [
        Sampler().sample(logits, [row(SamplingParams(temperature=0, logprobs=3, guide=guide))]).logprobs[0]
        for guide in (None, Allow(5))
    ]
    assert reports[0] is not None
    assert reports[1] is not None
    assert reports[0].top == reports[1].top


def test_biases() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    kept = logits.clone()
    best = int(logits.argmax())
    for bias, token in (({11: 100}, 11), ({best: -100}, int(logits[0].topk(2).indices[1])), ({500: 100}, best)):
        assert Sampler().sample(logits, [row(SamplingParams(temperature=0, logit_bias=bias))]).token_ids == [token]
    assert torch.equal(logits, kept)
    assert SamplingParams(logit_bias={5: 1, 2: 3}).biases == ((2, 3.0), (5, 1.0))
    hash(SamplingParams(logit_bias={5: 1}))


@pytest.mark.parametrize("wrong", [5, "ab", {1: 101}, {-1: 1}, {1: float("nan")}, {"a": 1}, [(1,)], {1: True}])
def test_wrong_biases_are_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=wrong)


def test_a_guide_that_allows_nothing_fails_its_row_alone() -> None:
    logits = torch.randn(2, 50)
    with pytest.raises(NonFiniteLogits) as caught:
        Sampler().sample(logits, [row(SamplingParams()), row(SamplingParams(guide=Allow()))])
    assert caught.value.rows == (1,)
    llm = byte_llm()
    good = SamplingParams(temperature=0, max_tokens=3)
    bad = SamplingParams(temperature=0, guide=Allow(why="too many items."))
    with pytest.raises(RequestError, match="grammar cannot go on: too many items; use") as failed:
        llm.generate([[5, 6], [5, 6]], [good, bad])
    assert len(failed.value.outputs[0].token_ids) == 3  # type: ignore[attr-defined]
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_logits_that_are_wrong_themselves_are_not_blamed_on_the_grammar() -> None:
    logits = torch.randn(2, 50)
    logits[1, 4] = torch.nan
    rows = [row(SamplingParams(guide=Allow(why="w"))), row(SamplingParams(guide=Allow(4)))]
    with pytest.raises(NonFiniteLogits) as caught:
        Sampler().sample(logits, rows)
    assert (caught.value.rows, caught.value.stuck) == ((0, 1), {0: "w"})


def test_a_guided_step_waits_for_the_host() -> None:
    def sequence(**settings: Any) -> Any:
        return SimpleNamespace(params=SamplingParams(temperature=0, **settings), fed=0, output_ids=[1], cascade=None)

    assert flies(sequence())
    assert not flies(sequence(guide=Allow(1)))
    assert not flies(sequence(logit_bias={1: 1}))


def test_preempted_requests_go_on_in_their_grammar() -> None:
    """By recomputation the generated tokens are fed again, but the grammar has read them already."""
    settings: dict[str, Any] = {"max_model_len": 256, "formats": (), "max_num_seqs": 8}
    roomy = byte_llm("full:window=8", **settings)
    tight = byte_llm("full:window=8", preemption="recompute", kv_cache_memory_bytes=560_000, **settings)
    grammars = GrammarCompiler(roomy.tokenizer, 260, (0, 3))
    params = SamplingParams(temperature=0, max_tokens=30, guide=grammars.regex("([ab][cd])+x"))
    prompts = [[10 + i] * 12 for i in range(8)]
    outputs = tight.generate(prompts, params)
    assert sum(o.metrics.preemptions for o in outputs if o.metrics) > 0
    assert [o.text for o in outputs] == [o.text for o in roomy.generate(prompts, params)]


class TestGrammars:
    @pytest.fixture(scope="class")
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(byte_tokenizer(), 260, (0, 3))

    def walk(self, grammar: Any, text: str) -> list[str]:
        """What may come after each character of a text: characters, and `end` for the end tokens."""
        tokenizer = byte_tokenizer()
        state, ids, allowed = grammar.start(), [], []
        for token in [None, *tokenizer(text)["input_ids"]]:
            ids += [] if token is None else [token]
            tokens = state.allowed(ids, 260).nonzero().flatten().tolist()
            allowed.append("".join(tokenizer.decode([t]) if t > 3 else "$" if t == 0 else "" for t in tokens))
        return allowed

    def test_a_choice_ends_with_an_end_token(self, grammars: GrammarCompiler) -> None:
        first, _, after, last = self.walk(grammars.choice(["yes", "you"]), "yes")
        assert first == "y"
        assert after == "s"
        assert last == "$"

    def test_a_wrong_token_leaves_nothing(self, grammars: GrammarCompiler) -> None:
        assert self.walk(grammars.regex("ab"), "b")[1] == ""

    def test_schemas(self, grammars: GrammarCompiler) -> None:
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        allowed = self.walk(grammars.json_schema(schema), json.dumps({"a": 1}))
        assert "{" in allowed[0]
        assert "$" in allowed[-1]
        assert "$" not in "".join(allowed[:-1])

    def test_white_space_has_an_end(self, grammars: GrammarCompiler) -> None:
        allowed = self.walk(grammars.json_object(), "{" + " " * 24)
        assert " " in allowed[-2]
        assert " " not in allowed[-1]

    def test_wrong_ones_are_refused(self, grammars: GrammarCompiler) -> None:
        for make in (
            lambda: grammars.json_schema({"type": "odd"}),
            lambda: grammars.regex("("),
            lambda: grammars.lark("nothing"),
            lambda: grammars.choice([]),
        ):
            with pytest.raises(RequestError):
                make()

    def test_logits_wider_than_the_tokenizer(self, grammars: GrammarCompiler) -> None:
        allowed = grammars.regex("a").start().allowed([], 320)
        assert allowed.shape == (320,)
        assert allowed.sum() == 1


def test_the_queue_is_in_order_of_priority() -> None:
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.waiting = deque()
    for name, priority in enumerate([0, 5, 0, -1, 5, -1]):
        scheduler.add(SimpleNamespace(name=name, params=SamplingParams(priority=priority)))  # type: ignore[arg-type]
    assert [s.name for s in scheduler.waiting] == [3, 5, 0, 2, 1, 4]  # type: ignore[attr-defined]
