"""Policies over the sifted cache, and the `kv` strings that name them: `full`, `uniform:k8v4`,
`diffkv:alpha_low=0.02,window=128`.

The same string works in Python, on the command line and in a request. A string is `name`, or `name:` and settings
`key=value` separated by commas;
a bare value sets the policy's first setting. `profile:FILE` names what `siftkv calibrate` wrote.
"""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any, Literal

from siftkv.errors import PolicyError
from siftkv.policies.adakv import AdaKV
from siftkv.policies.base import DecodeRule, Policy, PromptView
from siftkv.policies.diffkv import DiffKV
from siftkv.policies.duo import DuoAttention
from siftkv.policies.expected_attention import ExpectedAttention
from siftkv.policies.fixed import Fixed
from siftkv.policies.full import Full
from siftkv.policies.h2o import H2O
from siftkv.policies.hardkv import HardKV
from siftkv.policies.integer import Int4, Int8
from siftkv.policies.kivi import Kivi
from siftkv.policies.profile import ProfilePolicy
from siftkv.policies.pyramidkv import PyramidKV
from siftkv.policies.qaq import QAQ
from siftkv.policies.quest import Quest
from siftkv.policies.rkv import RKV
from siftkv.policies.sift import Sift
from siftkv.policies.snapkv import SnapKV
from siftkv.policies.streaming import StreamingLLM
from siftkv.policies.tova import TOVA
from siftkv.policies.uniform import Uniform

__all__ = [
    "H2O",
    "POLICIES",
    "QAQ",
    "RKV",
    "TOVA",
    "AdaKV",
    "DecodeRule",
    "DiffKV",
    "DuoAttention",
    "ExpectedAttention",
    "Fixed",
    "Full",
    "HardKV",
    "Int4",
    "Int8",
    "Kivi",
    "Policy",
    "ProfilePolicy",
    "PromptView",
    "PyramidKV",
    "Quest",
    "Sift",
    "SnapKV",
    "StreamingLLM",
    "Uniform",
    "parse_policy",
]

POLICIES: dict[str, type[Policy]] = {
    cls.name: cls
    for cls in (
        Full,
        Uniform,
        DiffKV,
        HardKV,
        Sift,
        Fixed,
        Int8,
        Int4,
        StreamingLLM,
        H2O,
        TOVA,
        SnapKV,
        PyramidKV,
        AdaKV,
        RKV,
        ExpectedAttention,
        DuoAttention,
        Quest,
        Kivi,
        QAQ,
    )
}
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
    if name.strip() == ProfilePolicy.name:
        return ProfilePolicy(rest.strip())
    cls = POLICIES.get(name.strip())
    if cls is None:
        raise PolicyError(f"unknown kv policy {name!r}: choose {', '.join(POLICIES)}, or profile:FILE")
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


_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def _convert(policy: str, key: str, text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is Literal:
        return text
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise PolicyError(f"{policy}: {key}={text!r} is not true or false")
        return _TRUTH[text.lower()]
    wanted = {int: "a whole number", float: "a number", str: "a word"}
    options = [t for t in (typing.get_args(kind) or (kind,)) if t in wanted]
    target = str if str in options else options[0]  # a word may also be a number: the policy tells
    try:
        return target(text)
    except ValueError:
        raise PolicyError(f"{policy}: {key}={text!r} is not {wanted[target]}") from None
