"""`sift`: a budget of bytes, kept by heads that differ, in the prompt and while decoding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siftkv import SamplingParams, parse_policy
from siftkv.errors import PolicyError
from siftkv.kernels.ranking import LEVELS, TierSizes, at_or_above
from siftkv.policies import Sift
from siftkv.policies.base import Prices, PromptView, RankedPrompts
from siftkv.policies.sift import _LATER_FIRST
from siftkv.policies.sift_shares import Room, by_rank, shares
from siftkv.policies.worth import mean_squares
from tests.policies.views import G, attention, view_of
from tests.tiny import prompt, tiny_llm

PRICES = Prices(token=(110.0, 80.0, 60.0), page=2640.0, slot=0.0, full=256.0)
TOKENS = torch.tensor([24, 33, 44])
"""A page, in each tier."""
SMALL = {
    "window": 8,
    "sinks": 2,
    "observe": 16,
    "reach": 20,
    "pool": 3,
    "young": 4,
    "prior": 0.0,
    "ahead": 0,
    "sample": 1,
}


def view(score: torch.Tensor, window: int = 8, sinks: int = 2) -> PromptView:
    """score: `[R, H, n]`, all there is to know."""
    n = score.shape[-1]
    position = torch.arange(n)
    protected = (position < sinks) | (position >= n - window)
    values = torch.ones(score.shape[0], n, score.shape[1], 16)
    return PromptView(0, score, protected, v=values)


def spent(tier: torch.Tensor, protected: torch.Tensor) -> torch.Tensor:
    """Bytes a head beyond the window, mean over a layer's heads."""
    counts = [((tier == t) & ~protected).sum(-1) * price for t, price in enumerate(PRICES.token)]
    return torch.stack(counts).sum(0).float().mean(-1)


def pages(tier: torch.Tensor, protected: torch.Tensor) -> torch.Tensor:
    """Pages of a layer, `[R, H, 3]`."""
    counts = torch.stack([((tier == t) & ~protected).sum(-1) for t in range(3)], -1)
    return (counts / TOKENS).ceil()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    n=st.integers(400, 900),
    ratio=st.floats(0.1, 0.4),
    contrast=st.floats(1, 30),
    sharpness=st.floats(0, 4),
    ahead=st.sampled_from([0, 20, 60]),
)
def test_the_budget_is_spent_in_full_pages_but_for_room_for_what_follows(
    seed: int, n: int, ratio: float, contrast: float, sharpness: float, ahead: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    score = (torch.randn(2, 3, n, generator=g) * sharpness).exp()
    policy, seen = Sift(ratio=ratio, contrast=contrast, **SMALL | {"ahead": ahead}), view(score)
    found = policy.sift(seen, PRICES)
    free = 3 * ahead * PRICES.token[2] * (ratio * n * PRICES.full >= 3 * PRICES.page)  # else part pages are free
    room = 3 * ratio * n * PRICES.full / PRICES.page
    used = pages(found.tier, seen.protected).sum((1, 2))
    assert (used <= room).all()
    if ratio * PRICES.full < 0.9 * PRICES.token[2]:  # else pages are wanted for which there are no tokens
        filled = spent(found.tier, seen.protected) * 3 + free
        assert (used * PRICES.page > room * PRICES.page - 2 * PRICES.page - free).all()
        assert (filled > (room - 2) * PRICES.page * 0.97).all(), "pages are full"
    assert found.share is not None
    tiers = (found.share > 0).sum((1, 2))
    for later in (n + 1, n * 17 // 16, n * 7 // 6, n * 4 // 3, 2 * n):
        cap = (found.share * later).ceil()
        grown = torch.maximum(pages(found.tier, seen.protected), (cap / TOKENS).ceil()).sum((1, 2))
        at_once = 3 if sharpness > 1 else tiers  # heads that are equal open their pages at the same time
        at_once = 2 if n + 1 < later <= n * 17 / 16 else at_once
        assert (grown <= room * later / n + at_once).all(), "it never runs ahead of the request"
        assert (grown > (room - tiers - 4) * later / n).all(), "nor far behind"


def test_what_follows_a_prompt_displaces_nothing_while_there_is_room_ahead() -> None:
    score = (torch.randn(1, 3, 600, generator=torch.Generator().manual_seed(4)) * 2).exp()
    seen = view(score)
    found = Sift(ratio=0.2, **SMALL | {"ahead": 30}).sift(seen, PRICES)
    assert found.share is not None
    held = ((found.tier == 2) & ~seen.protected).sum(-1)
    cap = ((found.share[..., 2] * 601).ceil() / TOKENS[2]).ceil() * TOKENS[2]
    assert (cap - held >= 30).all()
    assert (cap - held < 30 + TOKENS[2]).all()
    assert int(cap.sum()) / int(TOKENS[2]) == int(pages(found.tier, seen.protected)[..., 2].sum()) + int(
        (held % TOKENS[2] + 30 > TOKENS[2]).sum()
    )


def test_short_prompts_are_kept_in_part_pages_by_every_head() -> None:
    score = (torch.randn(1, 3, 150, generator=torch.Generator().manual_seed(5)) * 2).exp()
    policy, seen = Sift(ratio=0.2, **SMALL), view(score)
    tier = policy.sift(seen, PRICES).tier
    budget = 0.2 * 150 * PRICES.full - 1.5 * PRICES.page
    assert 0.9 * budget < float(spent(tier, seen.protected)) <= budget
    assert (tier >= 0).any(-1).all()


def test_layers_get_more_the_more_the_model_loses_with_their_tokens() -> None:
    costs = (1e-4, 1e-4 * math.e, 1e-4 * math.e**2)
    score = (torch.randn(1, 2, 4000, generator=torch.Generator().manual_seed(6)) * 2).exp()
    base = view(score)
    spends = []
    for tilt in (0.0, 0.02):
        policy = Sift(ratio=0.2, tilt=tilt, **SMALL)
        assert policy.weighs_layers == (tilt > 0)
        found = [policy.sift(replace(base, layer=i, layers=3), replace(PRICES, costs=costs)) for i in range(3)]
        spends.append([float(spent(f.tier, base.protected)) / PRICES.full / 4000 for f in found])
    assert spends[0] == pytest.approx([0.2, 0.2, 0.2], abs=0.003)
    assert spends[1] == pytest.approx([0.18, 0.2, 0.22], abs=0.003)


def test_a_concentrated_head_keeps_fewer_tokens_than_a_diffuse_one() -> None:
    n = 200
    diffuse, sharp = torch.ones(n), torch.full((n,), 1e-4)
    sharp[[20, 40, 60]] = 5.0
    tier = Sift(ratio=0.12, **SMALL).sift(view(torch.stack([diffuse, sharp])[None]), PRICES).tier[0]
    diffuse_kept, sharp_kept = (tier >= 0).sum(-1).tolist()
    assert sharp_kept < diffuse_kept
    assert (tier[1, [20, 40, 60]] >= 0).all()


@pytest.mark.parametrize(("n", "contrast"), [(1700, 12.0), (5000, 6.0), (12000, 12 * 2**-1.5), (90000, 3.0)])
def test_tiers_begin_at_powers_of_a_contrast_that_falls_with_the_room_there_is(n: int, contrast: float) -> None:
    score = (torch.randn(1, 3, n, generator=torch.Generator().manual_seed(2)) * 3).exp()
    policy = Sift(ratio=0.2, contrast=12, **SMALL)
    seen = view(score)
    tier, (worth, _) = policy.sift(seen, PRICES).tier, policy.worth(seen)
    top, high, low = (float(worth[(tier == t) & ~seen.protected].min()) for t in range(3))
    assert high == pytest.approx(contrast * low, rel=0.15)
    assert top == pytest.approx(contrast**3 * low, rel=0.3)
    assert float(worth[(tier < 0) & ~seen.protected].max()) <= 1.3 * low


def test_mean_squares_are_those_of_later_queries() -> None:
    seen, observe, reach = view_of(Sift(**SMALL)), 16, 20
    assert seen.q is not None
    assert seen.k is not None
    recent, distant = mean_squares(seen.q, seen.k, observe, reach)
    length = seen.length
    far = [reach + i * (length - reach) // observe for i in range(observe)]
    for request, head in ((0, 0), (1, 1)):
        square = torch.stack([attention(seen, request, head, g) for g in range(G)]).amax(0).square()
        for token in (0, 30, length - 30, length - 5):
            rows = range(max(token + 1, length - observe), length)
            expected = square[rows, token].mean()
            torch.testing.assert_close(recent[request, head, token], expected)
            rows = [r for r in far if r >= token + reach]
            expected = square[rows, token].mean() if len(rows) >= 4 else expected
            torch.testing.assert_close(distant[request, head, token], expected)


def test_what_one_query_needs_counts_more_than_what_all_glance_at() -> None:
    """Two tokens with the same mean attention: one query wants all of the first, all queries a little of the second."""
    length, dim = 64, 16
    q, k = torch.zeros(1, length, 1, dim), torch.zeros(1, length, 1, dim)
    k[0, 10, 0, 0] = q[0, 60, 0, 0] = 10.0
    recent, _ = mean_squares(q, k, 32, 64)
    assert float(recent[0, 0, 10]) > 20 * float(recent[0, 0, 11])


def test_the_last_tokens_count_as_the_average_at_least() -> None:
    seen = view(torch.cat([torch.ones(1, 2, 180), torch.zeros(1, 2, 20)], -1))
    worth, _ = Sift(**SMALL | {"young": 12}).worth(seen)
    assert (worth[..., 188:] > 0.5).all()
    assert (worth[..., 182:188] == 0).all()


def test_a_prior_keeps_more_tokens_less_precisely() -> None:
    score = (torch.randn(1, 3, 4000, generator=torch.Generator().manual_seed(8)) * 4).exp()
    counts, seeds = [], []
    for prior in (0.0, 0.1):
        found = Sift(ratio=0.2, **SMALL | {"prior": prior}).sift(view(score), PRICES)
        counts.append([int((found.tier == t).sum()) for t in range(3)])
        seeds.append(found.score)
    assert counts[1][0] + counts[1][1] < counts[0][0] + counts[0][1]
    assert sum(counts[1]) > 1.05 * sum(counts[0])
    torch.testing.assert_close(seeds[0], seeds[1])  # what is stored is what was seen


def test_stored_scores_are_in_proportion_to_squared_worth_and_in_sum_what_was_measured() -> None:
    policy, seen = Sift(**SMALL), view(torch.rand(1, 2, 150, generator=torch.Generator().manual_seed(9)) / 99)
    found, (worth, _) = policy.sift(seen, PRICES), policy.worth(seen)
    assert found.score is not None
    torch.testing.assert_close(found.score.sum(-1), seen.score.sum(-1))
    torch.testing.assert_close(found.score / found.score[..., :1], (worth / worth[..., :1]).square())


def test_prompts_of_a_batch_are_sifted_as_they_would_be_alone() -> None:
    score = torch.rand(3, 2, 150, generator=torch.Generator().manual_seed(1)) ** 4
    policy = Sift(ratio=0.15, **SMALL)
    together = policy.sift(view(score), PRICES)
    for i in range(3):
        alone = policy.sift(view(score[i : i + 1]), PRICES)
        assert torch.equal(together.tier[i], alone.tier[0])
        torch.testing.assert_close(together.score[i], alone.score[0])  # type: ignore[index]


class RankedHere:
    """`siftkv.kernels.ranking.Ranking` in PyTorch: what a GPU's kernels do."""

    def __init__(self, policy: Sift, views: list[PromptView], width: int) -> None:
        spread, self.views = [1 + _LATER_FIRST * v.position / v.length for v in views], views
        ranked = [policy.worth(v)[1] for v in views]
        self.apart = [(w * s).masked_fill(v.protected, -1.0) for w, s, v in zip(ranked, spread, views, strict=True)]
        self.above = torch.cat([at_or_above(x, width) for x in self.apart])
        self.shared = torch.empty(*self.above.shape[:2], 3), torch.empty(*self.above.shape[:2], 3)

    def share_out(self, sizes: TierSizes, room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The results are valid until it is asked again."""
        for kept, found in zip(self.shared, shares(self.above, sizes, Room(*room)), strict=True):
            kept.copy_(found)
        return self.shared

    def place(self, bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tier = [by_rank(x, bounds[i : i + 1])[0] for i, x in enumerate(self.apart)]
        return torch.cat(tier, 1), torch.cat([v.score[0] for v in self.views], 1)


@pytest.mark.parametrize("lengths", [(900, 40, 300, 150, 1), (700, 500), (900, 8000, 4000, 700, 8000)])
def test_prompts_of_other_lengths_are_sifted_as_they_would_be_alone(lengths: tuple[int, ...]) -> None:
    g, policy = torch.Generator().manual_seed(7), Sift(ratio=0.2, **SMALL)
    prices = replace(PRICES, costs=(1e-4, 1e-3, 3e-4))
    views = [replace(view((torch.randn(1, 3, n, generator=g) * 2).exp()), layer=1, layers=3) for n in lengths]

    def rank(width: int) -> RankedHere:
        return RankedHere(policy, views, width)

    found = policy.sift_ranked(RankedPrompts(1, 3, lengths, 3, rank), prices)
    assert found.share is not None
    for i, (seen, tier) in enumerate(zip(views, found.tier.split(lengths, 1), strict=True)):
        alone = policy.sift(seen, prices)
        assert torch.equal(tier, alone.tier[0])
        torch.testing.assert_close(found.share[i], alone.share[0])  # type: ignore[index]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(1, 300))
def test_levels_count_tokens_of_at_least_so_much_worth(seed: int, n: int) -> None:
    g = torch.Generator().manual_seed(seed)
    worth = (torch.randn(2, 3, n, generator=g) * 30).exp2().masked_fill(torch.rand(n, generator=g) < 0.2, -1.0)
    above = at_or_above(worth, LEVELS + 5)
    assert torch.equal(above[..., 0], (worth >= 0).sum(-1).float())
    assert not above[..., LEVELS:].any()
    for level in (1, 900, 1536, 1600, LEVELS - 1):
        least = 2.0 ** (level / 16 - 96)
        assert torch.equal(above[..., level], (worth >= least).sum(-1).float()), level
    assert at_or_above(torch.zeros(1, 1, 4), LEVELS)[0, 0, :2].tolist() == [4, 0]


def test_tokens_of_equal_worth_are_kept_as_far_as_the_budget_goes() -> None:
    policy, seen = Sift(ratio=0.2, **SMALL), view(torch.ones(1, 3, 150))
    tier = policy.sift(seen, PRICES).tier
    budget = 0.2 * 150 * PRICES.full - 1.5 * PRICES.page
    assert 0.9 * budget < float(spent(tier, seen.protected)) <= budget


def test_short_prompts_teach_nothing_about_heads() -> None:
    found = Sift(ratio=0.25, **SMALL).sift(view(torch.rand(1, 2, 40)), PRICES)
    assert found.share is not None
    per_token = found.share @ torch.tensor(PRICES.token)
    torch.testing.assert_close(per_token, torch.full((1, 2), 0.25 * 256.0))
    assert float(found.share[0, 0].sum()) <= 1


@pytest.mark.parametrize("ratio", [0.2, 0.35])
def test_an_engine_holds_the_ratio_while_it_decodes(ratio: float) -> None:
    policy = Sift(ratio=ratio, window=8, sinks=2, observe=16, pool=3)
    llm = tiny_llm(policy, max_model_len=500, kernels="numba")
    [short] = llm.generate([prompt(300)], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    [long] = llm.generate([prompt(300)], SamplingParams(temperature=0, max_tokens=190, ignore_eos=True))
    for out in (short, long):
        assert out.kv is not None
        entries = out.kv.tokens_by_tier
        kept = sum(entries[f] for f in (policy.top, policy.high, policy.low)) / sum(entries.values())
        assert kept > 0.02
    assert short.kv is not None
    assert long.kv is not None
    assert long.kv.ratio <= short.kv.ratio * 1.15


@pytest.mark.parametrize(
    "bad",
    [
        "sift:0",
        "sift:1.5",
        "sift:contrast=0.5",
        "sift:distant=-1",
        "sift:tilt=-1",
        "sift:prior=-1",
        "sift:reach=0",
        "sift:young=-1",
        "sift:ahead=-1",
        "sift:pool=4",
        "sift:high=k4v2,low=k4v4",
        "sift:horizon=0",
    ],
)
def test_bad_settings_are_refused(bad: str) -> None:
    with pytest.raises(PolicyError):
        parse_policy(f"sift:{bad}")
