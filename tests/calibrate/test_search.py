"""Knobs, goals, and brackets that shrink around the place that is looked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from siftkv.errors import PolicyError, SiftKVError
from siftkv.evaluate.calibrate.goal import Goal
from siftkv.evaluate.calibrate.knobs import ALPHA_HIGH, ALPHA_LOW, RATIO, Knob, steps_of
from siftkv.evaluate.calibrate.run import interpolated
from siftkv.evaluate.calibrate.search import FIRST, INSIDE, Found, Search
from siftkv.policies import DiffKV, Full, Policy, SnapKV, parse_policy
from siftkv.policies.profile_file import Figures, Tried

KNOB = Knob("alpha_low", 0.001, 1.0)


def figures(kl: float, ratio: float, agreement: float = 1.0) -> Figures:
    return Figures(positions=1, mean_kl=kl, worst_decile_kl=kl, agreement=agreement, ratio=ratio, per_entry=1.0)


def measure(curve: Callable[[float], Figures], calls: list[int]) -> Callable[[Sequence[Policy]], list[Figures]]:
    def run(policies: Sequence[Policy]) -> list[Figures]:
        calls.append(len(policies))
        return [curve(p.alpha_low) for p in policies]  # type: ignore[attr-defined]

    return run


def searched(goal: Goal, curve: Callable[[float], Figures], share: float = 1.0) -> tuple[Found, list[Tried], list[int]]:
    tried: list[Tried] = []
    calls: list[int] = []
    search = Search("alpha_low", lambda place: KNOB.turned(DiffKV(alpha_high=1.0), place), goal, share, tried)
    return search.run(measure(curve, calls)), tried, calls


def curve(alpha: float) -> Figures:
    return figures(alpha / 10, 0.5 - 0.4 * alpha**0.25)


def test_the_smallest_cache_within_a_kl() -> None:
    found, tried, calls = searched(Goal(max_kl=0.0037), curve)
    assert found.ok
    assert found.figures.mean_kl <= 0.0037
    assert found.figures.mean_kl > 0.0037 * 0.001 ** (1.01 / 100)  # the last bracket: a hundredth of three decades
    assert calls == [len(FIRST), len(INSIDE), len(INSIDE)]
    assert len(tried) == sum(calls)
    assert sum(t.meets for t in tried) == sum(t.figures.mean_kl <= 0.0037 for t in tried)


def test_the_best_cache_of_a_size() -> None:
    found, _, _ = searched(Goal(target_ratio=0.25), curve)
    assert found.ok
    assert 0.247 < found.figures.ratio <= 0.25


def test_a_step_may_use_a_share() -> None:
    found, _, _ = searched(Goal(max_kl=0.01), curve, share=0.5)
    assert 0.0045 < found.figures.mean_kl <= 0.005
    found, _, _ = searched(Goal(target_ratio=0.2), curve, share=0.5)
    gentlest = curve(0.001).ratio
    assert (gentlest + 0.2) / 2 - 0.003 < found.figures.ratio <= (gentlest + 0.2) / 2


def test_nothing_or_everything_is_good_enough() -> None:
    found, _, calls = searched(Goal(max_kl=1e-9), curve)
    assert not found.ok
    assert found.place == 0
    assert calls == [len(FIRST)]
    found, _, calls = searched(Goal(max_kl=9.0), curve)
    assert found.ok
    assert found.place == 1
    assert calls == [len(FIRST)]


def test_luck_beyond_a_failure_does_not_count() -> None:
    lucky = {FIRST[3]: 0.0}

    def bumpy(alpha: float) -> Figures:
        place = next(p for p in [*FIRST, -1.0] if p < 0 or abs(KNOB.value(p) - alpha) < 1e-9)
        return figures(lucky.get(place, alpha / 10), 0.3)

    found, tried, _ = searched(Goal(max_kl=0.002), bumpy)
    assert found.figures.mean_kl > 0
    assert KNOB.value(found.place) <= 0.02
    assert any(t.figures.mean_kl == 0 for t in tried)


def test_goals() -> None:
    goal = Goal(max_kl=0.01, min_agreement=0.9, target_ratio=0.3)
    assert goal.met(figures(0.01, 0.3, 0.9))
    assert not goal.met(figures(0.011, 0.3, 0.9))
    assert not goal.met(figures(0.01, 0.31, 0.9))
    assert not goal.met(figures(0.01, 0.3, 0.89))
    assert goal.good(figures(0.005, 1.0, 0.951), share=0.5)
    assert not goal.good(figures(0.005, 1.0, 0.949), share=0.5)
    assert Goal(min_agreement=0.9).bounds_quality
    assert not Goal(target_ratio=0.9).bounds_quality


@pytest.mark.parametrize(
    "limits", [{}, {"max_kl": 0.0}, {"target_ratio": 1.5}, {"min_agreement": 95.0}, {"max_kl": float("nan")}], ids=str
)
def test_goals_out_of_range(limits: dict[str, float]) -> None:
    with pytest.raises(SiftKVError, match="--"):
        Goal(**limits)


def test_knobs() -> None:
    assert [KNOB.value(p) for p in (0, 1 / 3, 1)] == [0.001, 0.01, 1.0]
    assert ALPHA_HIGH.value(0) == 0
    assert ALPHA_HIGH.value(1) == 20
    assert RATIO.turned(SnapKV(), 1.0) == SnapKV(ratio=0.05)


def test_diffkv_is_calibrated_in_two_steps() -> None:
    first, second = steps_of(DiffKV(alpha_low=0.3))
    start = first.prepared(DiffKV(alpha_low=0.3))
    assert start == DiffKV(alpha_low=0.0)
    assert first.knob(start) == ALPHA_HIGH
    assert second.knob(replace(start, alpha_high=0.7)) == replace(ALPHA_LOW, harsh=0.7)
    assert second.prepared(start) == start


def test_policies_without_a_knob() -> None:
    with pytest.raises(PolicyError, match="full has no setting"):
        steps_of(Full())
    assert len(steps_of(parse_policy("snapkv"))) == 1


def test_interpolation_is_along_powers() -> None:
    points = [(0.1, 0.1**-3), (0.4, 0.4**-3)]
    assert interpolated(points, 0.2) == pytest.approx(0.2**-3)
    assert interpolated(points, 0.05) == points[0][1]
    assert interpolated(points, 0.9) == points[1][1]
