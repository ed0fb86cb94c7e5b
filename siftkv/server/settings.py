"""What the operator of a server decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from siftkv.errors import PolicyError
from siftkv.policies import POLICIES, DuoAttention, Policy, ProfilePolicy, parse_policy
from siftkv.policies.duo import MEASURED


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the HTTP side.

    model_names: names that requests may use, the first is reported; empty = the model's own. api_keys: any of them
        opens everything; empty = no key is asked for. max_body_bytes: of a request's body. cors_origins: origins whose
        pages may call the server, `*` = all; empty = none. allow_kv: policies that requests may name, see `AllowedKv`;
        empty = every one that fits the pool. log_prompts: write prompts to the log. drain_seconds: how long running
        requests may take after SIGTERM. max_n: completions of one request.
    """

    model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    cors_origins: tuple[str, ...] = ()
    allow_kv: tuple[str, ...] = ()
    log_prompts: bool = False
    drain_seconds: float = 30.0
    max_n: int = 128


class AllowedKv:
    """Which policies requests may name: by name (`diffkv`: with any settings), or with settings (`uniform:k8v4`: those
    alone). A policy that reads a file needs an entry with that file: what the server may read is not for its clients to
    say. Raises PolicyError for one that does not exist.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = tuple(entries)
        self._names = {entry for entry in entries if entry in POLICIES}
        self._policies = [parse_policy(entry) for entry in entries]

    def parse(self, kv: str) -> Policy:
        """The policy that a request names. Raises PolicyError for one that is wrong or not allowed."""
        if kv in self._entries:
            return self._policies[self._entries.index(kv)]
        if _reads_a_file(kv):
            raise PolicyError("a request's kv cannot name a file: the operator allows one with --allow-kv")
        policy = parse_policy(kv)
        self.check(policy)
        return policy

    def check(self, policy: Policy) -> None:
        """Raise PolicyError for a policy that is not allowed."""
        if self._entries and policy.name not in self._names and policy not in self._policies:
            raise PolicyError(
                f"kv={policy.describe()!r} is not allowed on this server: choose {', '.join(self._entries)}"
            )

    def formats(self) -> tuple[str, ...]:
        """Formats that a pool must be opened with so that all of them can be used, `bf16` for the model's own."""
        names = [tier.format.name for policy in self._policies for tier in policy.tiers("bf16")]
        return tuple(dict.fromkeys(names))


def _reads_a_file(kv: str) -> bool:
    """Whether making this policy opens a file: a profile, or head scores that are not measured on the prompt."""
    name, _, settings = kv.partition(":")
    parts = (part.partition("=") for part in settings.split(","))
    asked = {key.strip(): value.strip() for key, _, value in parts}
    return name.strip() == ProfilePolicy.name or (
        name.strip() == DuoAttention.name and asked.get("heads", MEASURED) != MEASURED
    )
