"""From a model, a text and a goal to settings: the searches, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, log

from siftkv.benchmarks.fidelity import Protocol
from siftkv.cache import dense_name
from siftkv.cache.spec import MAX_TIERS
from siftkv.errors import SiftKVError
from siftkv.evaluate.calibrate import candidates
from siftkv.evaluate.calibrate.candidates import Bench
from siftkv.evaluate.calibrate.fragility import Fragility
from siftkv.evaluate.calibrate.goal import Goal
from siftkv.evaluate.calibrate.knobs import FORMATS, Knob, Step, steps_of
from siftkv.evaluate.calibrate.search import FIRST, ROUNDS, Found, Search
from siftkv.models import LoadedModel
from siftkv.policies import Policy, Uniform
from siftkv.policies.precise_keys import PRECISE_BITS, PreciseKeys
from siftkv.policies.profile_file import Figures, Tried

HEADS = "heads with 8-bit keys"
_MIX_ROUNDS = 2


@dataclass(frozen=True)
class Settings:
    """What a calibration found. policy: without `precise` heads, (layer, kv head) pairs. tried: in order."""

    policy: Policy
    precise: tuple[tuple[int, int], ...]
    reached: Figures
    tried: list[Tried]

    @property
    def whole(self) -> Policy:
        return PreciseKeys(self.policy, self.precise) if self.precise else self.policy


@dataclass
class Calibration:
    """A calibration of one model. `run` may be called once.

    measure: on the windows that settings are chosen by. fragility: of the model's keys. tried: what has been measured.
    """

    measure: Bench
    goal: Goal
    fragility: Fragility
    tried: list[Tried] = field(default_factory=list)

    def run(self, policy: Policy) -> Settings:
        """Settings of `policy` that meet the goal. Raises SiftKVError, with what was reached, where none do,
        PolicyError for a policy without a knob.
        """
        found, precise = self._formats(policy) if isinstance(policy, Uniform) else self._turn(policy)
        if not self.goal.met(found.figures):
            raise SiftKVError(
                f"no setting of {policy.name} reaches {self.goal} on this text: {found.policy.describe()} "
                f"has KL {found.figures.mean_kl:.4f} and agreement {found.figures.agreement:.1%} "
                f"at {found.figures.ratio:.1%} of the bytes"
            )
        base = found.policy.base if isinstance(found.policy, PreciseKeys) else found.policy
        return Settings(base, precise, found.figures, self.tried)

    def _formats(self, policy: Uniform) -> tuple[Found, tuple[tuple[int, int], ...]]:
        """A format for all, or one for most heads and 8-bit keys for those that lose most."""

        def at(place: float) -> Policy:
            return replace(policy, format=FORMATS[round(place * (len(FORMATS) - 1))])

        places = [i / (len(FORMATS) - 1) for i in range(len(FORMATS))]
        found = Search("format", at, self.goal, 1.0, self.tried).run(self.measure, places, rounds=1)
        chosen, rough = at(found.place), replace(policy, format="k4v4")
        gentler = found.ok and chosen == replace(policy, format="k8v4")
        if not (gentler if self.goal.bounds_quality else chosen == rough and found.ok):
            return found, ()
        ranked = self.fragility.ranked()

        def mixed(place: float) -> PreciseKeys:
            return PreciseKeys(rough, tuple(ranked[: round((1 - place) * len(ranked))]))

        better = Search(HEADS, mixed, self.goal, 1.0, self.tried).run(self.measure, rounds=_MIX_ROUNDS)
        heads = mixed(better.place).heads
        if not better.ok or len(heads) in (0, len(ranked)):
            return found, ()
        return better, heads

    def _turn(self, policy: Policy) -> tuple[Found, tuple[tuple[int, int], ...]]:
        """Every knob of a policy, then fragile heads, where 8-bit keys pay for themselves there."""
        for step in steps_of(policy):
            policy = step.prepared(policy)
            knob = step.knob(policy)
            if knob is not None:
                found, turned = self._search(step, knob, policy), (step, knob)
                policy = found.policy
        fragile = self.fragility.fragile()
        if not fragile or not found.ok or not self._mixes(policy):
            return found, ()
        mixed = PreciseKeys(policy, tuple(fragile))
        [figures] = self.measure([mixed])
        pays = self._pays(figures)
        self.tried.append(Tried(step=HEADS, kv=mixed.describe(), meets=pays, figures=figures))
        if not pays:
            return found, ()
        again = self._search(*turned, policy, mixed.heads, found.place)
        better = again.figures.ratio < found.figures.ratio or not self.goal.bounds_quality
        return (again, mixed.heads) if again.ok and better else (found, ())

    def _search(
        self, step: Step, knob: Knob, policy: Policy, precise: tuple[tuple[int, int], ...] = (), gentlest: float = 0.0
    ) -> Found:
        """Turn one knob, between `gentlest` and the harsh end."""

        def at(place: float) -> Policy:
            turned = knob.turned(policy, place)
            return PreciseKeys(turned, precise) if precise else turned

        name = f"{knob.name}, {HEADS}" if precise else knob.name
        first = [gentlest + x * (1 - gentlest) for x in (0.0, 0.25, 0.5, 0.75, 1.0)]
        return Search(name, at, self.goal, step.share, self.tried).run(self.measure, first)

    def _mixes(self, policy: Policy) -> bool:
        """Whether some heads can have 8-bit keys: the engine leaves the tiers to the policy, and the pool has room."""
        dense = dense_name(self.measure.model.decoder.dtype)
        if policy.query_rows or policy.skips or all(t.format.key_bits >= PRECISE_BITS for t in policy.tiers(dense)):
            return False
        return len(PreciseKeys(policy, ((0, 0),)).tiers(dense)) < MAX_TIERS  # `full` runs beside it

    def _pays(self, figures: Figures) -> bool:
        """Whether figures lie below the line through what the last knob reached, KL against bytes, both logarithmic."""
        last = self.tried[-1].step
        points = sorted((t.figures.ratio, t.figures.mean_kl) for t in self.tried if t.step == last)
        kl = interpolated(points, figures.ratio)
        return figures.mean_kl < kl


def expected_runs(model: LoadedModel, policy: Policy, windows: int, protocol: Protocol) -> int:
    """About how many runs of `protocol.forced` decode steps a calibration takes, the last one on held-out text."""
    if isinstance(policy, Uniform):
        formats: list[Policy] = [replace(policy, format=name) for name in FORMATS]
        return candidates.batches(model, formats, windows, protocol) + 2 * _a_round(windows, protocol) + 1
    return (len(steps_of(policy)) * ROUNDS + 1) * _a_round(windows, protocol) + 1


def _a_round(windows: int, protocol: Protocol) -> int:
    return -(-windows // candidates.windows_at_a_time(len(FIRST), windows, protocol))


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """y at `x` on the line through points of rising x, both axes logarithmic; the nearest end's outside. y > 0."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            share = (log(x) - log(x0)) / (log(x1) - log(x0)) if x1 > x0 else 1.0
            return exp(log(max(y0, 1e-12)) * (1 - share) + log(max(y1, 1e-12)) * share)
    return points[-1][1]
