"""What a calibration is after, and whether figures are good enough for it."""

from __future__ import annotations

from dataclasses import dataclass

from siftkv.errors import SiftKVError
from siftkv.policies.profile_file import Figures, Target


@dataclass(frozen=True)
class Goal:
    """Limits, None where there is none. Raises SiftKVError for one out of range, or none at all.

    max_kl: mean KL in nats a token. target_ratio: physical bytes by those of bf16. min_agreement: share of positions
        where the likeliest token is that of the full cache.

    With a limit on quality the smallest cache within it is looked for, else the best one of `target_ratio`.
    """

    max_kl: float | None = None
    target_ratio: float | None = None
    min_agreement: float | None = None

    def __post_init__(self) -> None:
        if self.max_kl is None and self.target_ratio is None and self.min_agreement is None:
            raise SiftKVError("nothing to aim for: give --max-kl, --min-agreement or --target-ratio")
        if self.max_kl is not None and not self.max_kl > 0:
            raise SiftKVError(f"--max-kl {self.max_kl}: use a number above 0, in nats a token, such as 0.01")
        for name, value in (("target-ratio", self.target_ratio), ("min-agreement", self.min_agreement)):
            if value is not None and not 0 < value < 1:
                raise SiftKVError(f"--{name} {value}: use a share between 0 and 1, such as 0.25 or 0.95")

    @property
    def bounds_quality(self) -> bool:
        """Whether quality is what limits, not size."""
        return self.max_kl is not None or self.min_agreement is not None

    @property
    def target(self) -> Target:
        return Target(max_kl=self.max_kl, target_ratio=self.target_ratio, min_agreement=self.min_agreement)

    def good(self, figures: Figures, share: float = 1.0) -> bool:
        """Whether quality is within `share` of what may be lost."""
        kl = self.max_kl is None or figures.mean_kl <= share * self.max_kl
        return kl and (self.min_agreement is None or 1 - figures.agreement <= share * (1 - self.min_agreement))

    def small(self, figures: Figures, gentlest: Figures, share: float = 1.0) -> bool:
        """Whether `share` of the bytes between the gentlest setting and the target is saved."""
        if self.target_ratio is None:
            return True
        return figures.ratio <= gentlest.ratio - share * max(0.0, gentlest.ratio - self.target_ratio)

    def met(self, figures: Figures) -> bool:
        """Whether all limits hold."""
        return self.good(figures) and (self.target_ratio is None or figures.ratio <= self.target_ratio)

    def __str__(self) -> str:
        limits = {"KL <=": self.max_kl, "agreement >=": self.min_agreement, "bytes <=": self.target_ratio}
        return ", ".join(f"{name} {value:g}" for name, value in limits.items() if value is not None)
