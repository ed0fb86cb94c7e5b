"""Policies over the sifted cache, and the `kv` strings that name them: `full`, `uniform:k8v4`,
`diffkv:alpha_low=0.02,window=128`.

The same string works in Python, on the command line and in a request. A string is `name`, or `name:` and settings
`key=value` separated by commas;
a bare value sets the policy's first setting.
"""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any, Literal

from siftkv.errors import PolicyError
from siftkv.policies.base import DecodeRule, Policy, PromptView
from siftkv.policies.diffkv import DiffKV
from siftkv.policies.fixed import Fixed
from siftkv.policies.full import Full
from siftkv.policies.uniform import Uniform

__all__ = ["POLICIES", "DecodeRule", "DiffKV", "Fixed", "Full", "Policy", "PromptView", "Uniform", "parse_policy"]

POLICIES: dict[str, type[Policy]] = {cls.name: cls for cls in (Full, Uniform, DiffKV, Fixed)}
"""Every policy by its name. Adding one is a file with a dataclass and an entry here."""


def parse_policy(kv: str | Policy) -> Policy:
    """The policy that a `kv` string names. Raises PolicyError that lists what exists when a name, setting or value is
    not one.
    """
    if isinstance(kv, Policy):
        return kv
    if not isinstance(kv, str):
        raise PolicyError(f"kv must be a string or a policy, not {type(kv).__name__}")
    name, _, rest = kv.strip().partition(":")
    cls = POLICIES.get(name.strip())
    if cls is None:
        raise PolicyError(f"unknown kv policy {name!r}: choose {', '.join(POLICIES)}")
    settings = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    types = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for part in (p.strip() for p in rest.split(",") if p.strip()):
        key, equals, text = (x.strip() for x in part.partition("="))
        if not equals:
            key, text = next(iter(settings)), part
        if key not in settings:
            raise PolicyError(f"{cls.name} has no setting {key!r}: it has {', '.join(settings)}")
        if key in values:
            raise PolicyError(f"{kv!r} sets {key} twice")
        values[key] = _convert(cls.name, key, text, types[key])
    return cls(**values)


def _convert(policy: str, key: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        return text
    wanted = {int: "a whole number", float: "a number", str: "a word"}
    options = [t for t in (typing.get_args(kind) or (kind,)) if t in wanted]
    target = options[0]
    try:
        return target(text)
    except ValueError:
        raise PolicyError(f"{policy}: {key}={text!r} is not {wanted[target]}") from None
