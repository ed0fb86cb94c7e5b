"""What can be turned in which policy: each knob leads from gentle (large and exact) to harsh (small and rough)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from siftkv.errors import PolicyError
from siftkv.policies import DiffKV, Policy

FORMATS = ("k8v8", "k8v4", "k4v4", "k4v2")
"""Formats of `uniform`, from gentle to harsh."""


@dataclass(frozen=True)
class Knob:
    """A number in a policy's settings. Places on it run from 0, `gentle`, to 1, `harsh`, evenly in the logarithm.

    zero: place 0 is the value 0 instead, where the setting does nothing.
    """

    name: str
    gentle: float
    harsh: float
    zero: bool = False

    def value(self, place: float) -> float:
        """The setting at a place between 0 and 1, to three digits."""
        if self.zero and place <= 0:
            return 0.0
        return float(f"{self.gentle * (self.harsh / self.gentle) ** place:.3g}")

    def turned(self, policy: Policy, place: float) -> Policy:
        """`policy` with this knob at a place."""
        changed: Policy = replace(policy, **{self.name: self.value(place)})  # type: ignore[type-var]
        return changed


@dataclass(frozen=True)
class Step:
    """One search. knob: of the policy that `prepared` makes of what came before; None where it has nothing to turn.

    share: of the quality that may be lost, and of the bytes that must be saved, that this step may use up.
    """

    knob: Callable[[Policy], Knob | None]
    share: float
    prepared: Callable[[Policy], Policy] = lambda policy: policy


RATIO = Knob("ratio", 1.0, 0.05)
ALPHA_HIGH = Knob("alpha_high", 0.05, 20.0, zero=True)
ALPHA_LOW = Knob("alpha_low", 0.001, 2.0, zero=True)
_FIRST_SHARE = 0.5


def _alpha_low(policy: Policy) -> Knob | None:
    """Up to where tokens would be dropped before they are demoted."""
    most = policy.alpha_high if isinstance(policy, DiffKV) else None
    if not isinstance(most, (int, float)):
        raise PolicyError("alpha_high has one value a head: give one for all, calibration finds alpha_low for that")
    return replace(ALPHA_LOW, harsh=min(ALPHA_LOW.harsh, float(most))) if most > ALPHA_LOW.gentle else None


DIFFKV_STEPS = (
    Step(lambda _: ALPHA_HIGH, _FIRST_SHARE, lambda policy: replace(policy, alpha_low=0.0)),  # type: ignore[type-var]
    Step(_alpha_low, 1.0),
)
"""DiffKV's calibration (arXiv 2412.03131, section 4): alpha_high with nothing dropped, then alpha_low."""


def steps_of(policy: Policy) -> tuple[Step, ...]:
    """The searches that find a policy's settings. Raises PolicyError for a policy without a knob."""
    if isinstance(policy, DiffKV):
        return DIFFKV_STEPS
    if any(field.name == RATIO.name for field in fields(policy)):  # type: ignore[arg-type]
        return (Step(lambda _: RATIO, 1.0),)
    raise PolicyError(
        f"{policy.name} has no setting that calibration can turn: use uniform, diffkv, or a policy with a ratio"
    )
