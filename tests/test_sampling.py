"""SamplingParams refuses what makes no sense; the sampler draws from the distribution that the parameters describe."""

import dataclasses
import json
import math

import pytest
import torch

from siftkv.engine.outputs import CompletionOutput, KVReport, RequestOutput
from siftkv.engine.sampler import NonFiniteLogits, Sampler, SamplingRow, _adjust, rank
from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import NumericsError, RequestError

NAN, INF = math.nan, math.inf

REFUSED = [
    ("temperature", [NAN, INF, -0.1, "1", True, None, 10**400]),
    ("top_p", [0, 0.0, 1.01, -1, NAN, "0.5", None]),
    ("top_k", [-2, 1.5, "3", True, None]),
    ("min_p", [-0.01, 1.01, NAN, None]),
    ("repetition_penalty", [0, -1, NAN, INF, None]),
    ("presence_penalty", [2.01, -2.01, NAN, None]),
    ("frequency_penalty", [2.01, -2.01, NAN, None]),
    ("seed", [-1, 2**63, 0.5, True, "7"]),
    ("n", [0, -1, 1.0, True, None]),
    ("max_tokens", [0, -1, 2.5, True]),
    ("min_tokens", [-1, 17, 1.5, None]),
    ("logprobs", [-1, 21, 1.5, True]),
    ("stop", ["", ["a", ""], [1], 3, {"a"}, b"a"]),
    ("stop_token_ids", [[1.0], ["1"], "12", [True], [-1], 5, None]),
    ("ignore_eos", [1, None]),
    ("include_stop_str_in_output", ["yes", None]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED for value in values])
def test_refused_values_name_the_parameter(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_limits_are_accepted_and_normalised():
    params = SamplingParams(
        temperature=0, top_p=1, top_k=-1, min_p=1, presence_penalty=-2, frequency_penalty=2, seed=2**63 - 1,
        stop="end", stop_token_ids=[3, 4], max_tokens=None, min_tokens=100, logprobs=20,
    )  # fmt: skip
    assert params.stop == params.stop_strings == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert isinstance(params.temperature, float)
    assert params.greedy
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()
    assert hash(SamplingParams(stop=["a"], stop_token_ids=[1])) == hash(SamplingParams(stop="a", stop_token_ids=(1,)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


def test_greedy_below_the_documented_temperature():
    assert SamplingParams(temperature=0.9e-5).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def row(prompt=(), output=(), eos=(), index=0, **params):
    return SamplingRow(SamplingParams(**params), list(prompt), list(output), eos, index)


def sample(logits, *rows):
    return Sampler().sample(torch.as_tensor(logits, dtype=torch.float32), rows).token_ids


def generate(logits, rows, steps):
    """[steps, B] tokens, each appended to its row's output."""
    tokens = []
    for _ in range(steps):
        tokens.append(sample(logits, *rows))
        for one, token in zip(rows, tokens[-1]):
            one.output_ids.append(token)
    return tokens


def draws(logits, count, **params):
    """Frequencies of `count` draws: one request's consecutive outputs, all drawn from the same logits."""
    asked = SamplingParams(seed=11, **params)
    rows = [SamplingRow(asked, [], range(step)) for step in range(count)]
    tokens = sample(torch.as_tensor(logits).expand(count, -1), *rows)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


def test_greedy_takes_the_lowest_of_equal_ids_in_every_path():
    logits = [[0.0, 5.0, 5.0, 1.0], [7.0, 7.0, 7.0, 7.0]]
    assert sample(logits, row(temperature=0), row(temperature=0)) == [1, 0]
    assert sample(logits, row(temperature=0, presence_penalty=1), row(temperature=1, top_k=1)) == [1, 0]
    assert Sampler().sample(torch.zeros(1, 300, dtype=torch.bfloat16), [row(temperature=0)]).token_ids == [0]


def test_empty_batch():
    assert Sampler().sample(torch.empty(0, 4), []).token_ids == []


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.8, "min_p": 0.01}, {"min_p": 0.02}]
)
def test_draws_do_not_depend_on_batch_mates_or_place(params):
    torch.manual_seed(0)
    logits = torch.randn(5, 5000) * 2
    mine = logits[3]
    alone = [tokens[0] for tokens in generate(mine[None], [row(seed=5, **params)], 30)]

    mates = [row(seed=5), row(seed=1, top_k=7), row(temperature=0, repetition_penalty=1.2), row(top_p=0.5)]
    for place in (0, 3, 4):
        batch = [dataclasses.replace(mate, output_ids=[]) for mate in mates]
        batch.insert(place, row(seed=5, **params))
        batch_logits = torch.cat((logits[:place], mine[None], logits[place + 1 :]))
        assert [tokens[place] for tokens in generate(batch_logits, batch, 30)] == alone
    assert len(set(alone)) > 5


def test_a_replayed_step_draws_the_same_token():
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    replayed = row(output=[4, 9, 2], seed=3)
    assert sample(logits, replayed) == sample(logits, replayed) == sample(logits, row(output=[4, 9, 2], seed=3))


def test_seeds_completions_and_unseeded_requests_differ():
    rows = (row(seed=0), row(seed=1), row(seed=0, index=1), row(seed=0, output=[1]), row(), row())
    assert len({one.uniform() for one in rows}) == len(rows)
    assert row(seed=0).uniform() == row(seed=0).uniform()


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution, written out in plain Python over lists."""
    weights = [math.exp(x / temperature) for x in logits]
    total = sum(weights)
    probabilities = [w / total for w in weights]
    kept = [i for i, p in enumerate(probabilities) if p >= min_p * max(probabilities)]
    kept.sort(key=lambda i: (-probabilities[i], i))
    if top_k > 0:
        kept = kept[:top_k]
    mass, nucleus = sum(probabilities[i] for i in kept), []
    for i in kept:
        if sum(probabilities[j] for j in nucleus) >= top_p * mass:
            break
        nucleus.append(i)
    mass = sum(probabilities[i] for i in nucleus)
    return torch.tensor([probabilities[i] / mass if i in nucleus else 0.0 for i in range(len(logits))])


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.75},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.7},
        {"temperature": 1.5, "min_p": 0.15, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 5, "min_p": 0.3, "top_p": 0.9},
    ],
)
def test_draws_follow_the_reference_distribution(params):
    logits = [1.0, 0.1, 2.0, -1.0, 0.7, 1.0, -3.0, 1.5]
    expected, count = reference(logits, **params), 20_000
    frequencies = draws(logits, count, **params)
    assert frequencies[expected == 0].sum() == 0, "a token outside the support was drawn"
    error = (expected * (1 - expected) / count).sqrt()
    assert ((frequencies - expected).abs() <= 4.5 * error + 1e-9).all()


def test_top_k_keeps_exactly_k_of_equal_logits():
    frequencies = draws([1.0] * 6, 2000, top_k=3)
    assert (frequencies[:3] > 0).all()
    assert frequencies[3:].sum() == 0


def test_nucleus_wider_than_the_trial_reaches_the_whole_vocabulary():
    vocab = 4000
    flat = draws([0.0] * vocab, 4000, top_p=0.9)
    assert flat[3700:].sum() == 0, "0.9 of a flat vocabulary of 4000 is its first 3600 tokens"
    assert flat[2000:3600].sum() == pytest.approx(1600 / 3600, abs=0.04)


def test_tokens_of_zero_probability_are_never_drawn():
    logits = [-INF, 0.0, -INF, 0.0, -INF]
    for params in ({}, {"top_k": 4}, {"top_p": 0.99}):
        frequencies = draws(logits, 2000, **params)
        assert frequencies[1] + frequencies[3] == pytest.approx(1)


def test_rank_is_a_stable_descending_sort():
    scores = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    scores[0, :9] = torch.tensor([0.0, -0.0, -INF, 0.0, -0.0, 3e38, -3e38, 1e-42, -1e-42])
    expected = scores.sort(dim=-1, descending=True, stable=True).indices
    for width in (1, 7, 500):
        assert torch.equal(rank(scores, width), expected[:, :width])


def processed(logits, one):
    return _adjust(torch.tensor([logits]), [one])[0]


def test_penalties_follow_their_formulas():
    logits = [2.0, -2.0, 1.0, -1.0, 0.5, 3.0]
    prompt, output = [0, 1, 1], [2, 3, 3, 3]
    by_repetition = processed(logits, row(prompt, output, repetition_penalty=2.0))
    assert by_repetition.tolist() == [1.0, -4.0, 0.5, -2.0, 0.5, 3.0]
    by_presence = processed(logits, row(prompt, output, presence_penalty=0.5))
    assert by_presence.tolist() == [2.0, -2.0, 0.5, -1.5, 0.5, 3.0]
    by_frequency = processed(logits, row(prompt, output, frequency_penalty=0.5))
    assert by_frequency.tolist() == [2.0, -2.0, 0.5, -2.5, 0.5, 3.0]
    everything = processed(
        logits, row(prompt, output, repetition_penalty=2.0, presence_penalty=-1.0, frequency_penalty=1.0)
    )
    assert everything.tolist() == [1.0, -4.0, 0.5, -4.0, 0.5, 3.0]
    first_token = processed(logits, row(prompt, [], repetition_penalty=2.0, presence_penalty=1.0))
    assert first_token.tolist() == [1.0, -4.0, 1.0, -1.0, 0.5, 3.0]


def test_penalties_move_the_choice_of_their_own_row_only():
    logits = torch.tensor([[3.0, 2.9, 0.0]] * 2)
    before = logits.clone()
    assert sample(logits, row(output=[0], temperature=0, presence_penalty=1), row(output=[0], temperature=0)) == [1, 0]
    assert torch.equal(logits, before), "the caller's logits must not change"


def test_penalties_follow_the_growing_output():
    one = row(temperature=0, presence_penalty=2)
    assert [tokens[0] for tokens in generate(torch.tensor([[3.0, 2.0, 1.5]]), [one], 3)] == [0, 1, 2]


def test_end_tokens_are_banned_until_min_tokens():
    logits = [[5.0, 4.0, 3.0, 2.0]]
    params = {"temperature": 0, "min_tokens": 2, "stop_token_ids": [1]}
    assert sample(logits, row(output=[2], eos=[0, 9], **params)) == [2], "9 is outside the vocabulary: no ban needed"
    assert sample(logits, row(output=[2, 2], eos=[0], **params)) == [0]
    assert sample(logits, row(output=[2], eos=[0], ignore_eos=True, **params)) == [0]
    assert sample(logits, row(output=[2], eos=[0], **(params | {"temperature": 1.0, "top_k": 1}))) == [2]


def test_logprobs_are_those_of_the_raw_logits():
    torch.manual_seed(4)
    logits = torch.randn(4, 50)
    expected = logits.log_softmax(-1)
    rows = [
        row(temperature=0, logprobs=3, output=[1], presence_penalty=2),
        row(temperature=0),
        row(temperature=5, top_k=9, logprobs=0, seed=1),
        row(temperature=1, logprobs=20, seed=1),
    ]
    result = Sampler().sample(logits, rows)
    assert result.logprobs[1] is None
    for i, width in ((0, 3), (2, 0), (3, 20)):
        report, token = result.logprobs[i], result.token_ids[i]
        assert report.token_id == token
        assert report.logprob == pytest.approx(expected[i, token].item(), abs=1e-6)
        best = expected[i].topk(width)
        assert list(report.top) == best.indices.tolist()
        assert list(report.top.values()) == pytest.approx(best.values.tolist(), abs=1e-6)


def test_more_logprobs_than_tokens_in_the_vocabulary():
    report = Sampler().sample(torch.tensor([[0.0, 1.0]]), [row(temperature=0, logprobs=5)]).logprobs[0]
    assert list(report.top) == [1, 0]


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("temperature", [0, 1])
def test_bad_logits_name_their_rows(bad, temperature):
    logits = torch.zeros(3, 4)
    logits[1, 2] = bad
    rows = [row(temperature=temperature, seed=1) for _ in range(3)]
    with pytest.raises(NonFiniteLogits, match=r"row\(s\) \[1\]") as caught:
        Sampler().sample(logits, rows)
    assert isinstance(caught.value, NumericsError)
    assert caught.value.rows == (1,)


def test_kv_report_counts_and_serialises():
    tiers = {"int8": 30, "window": 10, "dropped": 60}
    report = KVReport("half", 25, 800, 900, 3200, tiers, 4, [[[15, 5, 30], [15, 5, 30]]])
    assert report.ratio == 0.25
    assert report.bytes_per_live_token == 20
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded["ratio"] == 0.25
    assert loaded["bytes_per_live_token"] == 20
    assert loaded["tokens_by_tier"] == tiers
    assert loaded["per_head_tokens"] == [[[15, 5, 30], [15, 5, 30]]]
    empty = KVReport("none", 0, 0, 0, 0, {"window": 0, "dropped": 0}, 0)
    assert (empty.ratio, empty.bytes_per_live_token) == (0, 0)


def test_request_output_shortcuts_read_the_first_completion():
    first, second = CompletionOutput(0, "a", [1], "stop"), CompletionOutput(1, "b", [2])
    output = RequestOutput("r", "p", [0], [first, second])
    assert (output.text, output.token_ids, output.finish_reason, output.kv) == ("a", [1], "stop", None)
    assert not output.finished
    second.finish_reason = "length"
    assert output.finished
