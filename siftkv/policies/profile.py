"""`profile:FILE`: the settings that `siftkv calibrate` found for a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier
from siftkv.policies.base import DecodeRule, Policy, PromptView
from siftkv.policies.precise_keys import PreciseKeys

if TYPE_CHECKING:
    from siftkv.policies.profile_file import Profile


@dataclass(frozen=True, eq=False)
class ProfilePolicy(Policy):
    """The policy of a profile; an engine refuses it for another model. Read when it is made: a file that changes makes
    another policy.

    file: path of the profile. Raises PolicyError for one that cannot be read.
    """

    name: ClassVar[str] = "profile"

    file: str

    def __post_init__(self) -> None:
        from siftkv.policies.profile_file import read_profile  # brings pydantic along, which no other policy needs

        if not self.file:
            raise PolicyError("profile needs a file: profile:FILE, as 'siftkv calibrate' writes it")
        profile = read_profile(self.file)
        found = policy_of(profile)
        digest = hashlib.sha256(profile.model_dump_json().encode()).hexdigest()[:16]
        hidden = {
            "_profile": profile,
            "_policy": found,
            "_digest": digest,
            "window": found.window,
            "sinks": found.sinks,
        }
        for name, value in hidden.items():
            object.__setattr__(self, name, value)

    @property
    def profile(self) -> Profile:
        known: Profile = vars(self)["_profile"]
        return known

    @property
    def policy(self) -> Policy:
        """What the profile says, whatever the model."""
        known: Policy = vars(self)["_policy"]
        return known

    def for_model(self, fingerprint: Callable[[], str]) -> Policy:
        made_for = self.profile.model
        if fingerprint() != made_for.fingerprint:
            raise PolicyError(
                f"the profile {self.file} was made for another model ({made_for.name}, {made_for.layers} layers of "
                f"{made_for.kv_heads} kv heads): make one for this model with 'siftkv calibrate'"
            )
        return self.policy

    def describe(self) -> str:
        return f"{self.name}:{self.file}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProfilePolicy) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"ProfilePolicy(file={self.file!r}, sha256={vars(self)['_digest']})"

    @property
    def query_rows(self) -> int:
        return self.policy.query_rows

    @property
    def skips(self) -> bool:
        return self.policy.skips

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return self.policy.tiers(dense)

    def rows(self, length: int) -> tuple[Tensor, Tensor] | None:
        return self.policy.rows(length)

    def classify(self, prompt: PromptView) -> Tensor:
        return self.policy.classify(prompt)

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        return self.policy.decode_rule(num_layers, num_kv_heads)


def policy_of(profile: Profile) -> Policy:
    """The policy that a profile describes. Raises PolicyError for settings that name none, or another profile."""
    from siftkv.policies import parse_policy  # imports this file

    if profile.policy.strip().partition(":")[0].strip() == ProfilePolicy.name:
        raise PolicyError("a profile cannot name another profile: give the policy itself")
    policy = parse_policy(profile.policy)
    return PreciseKeys(policy, tuple(profile.precise_keys)) if profile.precise_keys else policy
