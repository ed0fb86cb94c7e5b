"""Where a knob should stand: brackets that shrink, several places measured side by side in each round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from siftkv.evaluate.calibrate.candidates import Measure
from siftkv.evaluate.calibrate.goal import Goal
from siftkv.policies import Policy
from siftkv.policies.profile_file import Figures, Tried

FIRST = (0.0, 0.25, 0.5, 0.75, 1.0)
INSIDE = (0.2, 0.4, 0.6, 0.8)
ROUNDS = 3


@dataclass(frozen=True)
class Found:
    """Where a search ended. place: between 0 and 1. ok: whether it is good enough; if not, it is what comes closest."""

    place: float
    policy: Policy
    figures: Figures
    ok: bool


@dataclass(frozen=True)
class Search:
    """A search over places from 0 (gentle) to 1 (harsh).

    name: in the path. at: the policy at a place. share: as in `knobs.Step`. tried: what was measured is added to it.
    """

    name: str
    at: Callable[[float], Policy]
    goal: Goal
    share: float
    tried: list[Tried]

    def run(self, measure: Measure, first: Sequence[float] = FIRST, rounds: int = ROUNDS) -> Found:
        """With limits on quality the harshest place within them, else the gentlest that is small enough.

        One that is good enough counts only if all gentler (harsher) ones are too, so that luck does not decide.
        first: places of the first round, rising; the search stays between them.
        """
        known: dict[float, tuple[Policy, Figures]] = {}
        places = list(first)
        for turn in range(rounds):
            policies = [self.at(place) for place in places]
            known |= dict(zip(places, zip(policies, measure(policies), strict=True), strict=True))
            ends = self._bracket(known)
            if turn == rounds - 1 or ends is None:
                break
            low, high = ends
            inside = {repr(self.at(low + x * (high - low))): low + x * (high - low) for x in INSIDE}
            places = [place for key, place in inside.items() if key not in {repr(p) for p, _ in known.values()}]
            if not places:
                break
        gentlest = known[min(known)][1]
        self.tried.extend(
            Tried(step=self.name, kv=p.describe(), meets=self._ok(f, gentlest), figures=f) for p, f in known.values()
        )
        return self._best(known)

    def _ok(self, figures: Figures, gentlest: Figures) -> bool:
        if self.goal.bounds_quality:
            return self.goal.good(figures, self.share)
        return self.goal.small(figures, gentlest, self.share)

    def _run_of_good(self, known: dict[float, tuple[Policy, Figures]]) -> tuple[list[float], list[float]]:
        """Places from the safe end that are all good enough, and the others in the same order."""
        order = sorted(known, reverse=not self.goal.bounds_quality)
        gentlest = known[min(known)][1]
        count = 0
        while count < len(order) and self._ok(known[order[count]][1], gentlest):
            count += 1
        return order[:count], order[count:]

    def _bracket(self, known: dict[float, tuple[Policy, Figures]]) -> tuple[float, float] | None:
        """Between which places the boundary lies; None where all or none are good enough."""
        good, others = self._run_of_good(known)
        return (good[-1], others[0]) if good and others else None

    def _best(self, known: dict[float, tuple[Policy, Figures]]) -> Found:
        good, others = self._run_of_good(known)
        place = good[-1] if good else others[0]
        return Found(place, *known[place], ok=bool(good))
