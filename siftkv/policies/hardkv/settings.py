"""Checks of Hard-KV's settings: each failure is one sentence that says what to use instead."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from siftkv.errors import PolicyError
from siftkv.formats import TierFormat
from siftkv.policies.base import check_whole, check_window
from siftkv.policies.hardkv.metrics import METRICS
from siftkv.policies.scores import MOST_POOLED

if TYPE_CHECKING:
    from siftkv.policies.hardkv.policy import HardKV

CHOICES: dict[str, tuple[str, ...]] = {
    "metric": tuple(METRICS),
    "condense": ("evict", "merge"),
    "calibrate": ("rank", "temperature"),
    "group": ("union", "max"),
    "layout": ("true", "max"),
    "select": ("votes", "topk"),
}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BYTES = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([KMG]?)(?:iB|B)", re.IGNORECASE)


def budget_of(setting: int | str | None) -> int | str | None:
    """A budget as it was meant: tokens a head (int), bytes a request (a string such as `8MiB`), or None.

    Raises PolicyError for anything else.
    """
    if setting is None or (isinstance(setting, str) and setting.lower() == "none"):
        return None
    text = str(setting).strip()
    if text.isascii() and text.isdigit() and not isinstance(setting, bool):
        check_whole("budget", int(text), 0)
        return int(text)
    if not isinstance(setting, str) or _BYTES.fullmatch(text) is None:
        raise PolicyError(f"budget={setting!r}: use tokens a head (1024) or bytes a request (8MiB)")
    return text


def budget_bytes(budget: str) -> int:
    """Bytes of a budget such as `8MiB`; units count in 1024s."""
    found = _BYTES.fullmatch(budget)
    assert found is not None
    return int(float(found[1]) * _UNITS[found[2].upper()])


def check_settings(policy: HardKV) -> None:
    """Raise PolicyError for the first setting that cannot be used."""
    check_window(policy.window, policy.sinks)
    if isinstance(policy.p, bool) or not isinstance(policy.p, (int, float)) or not 0 < policy.p <= 1:
        raise PolicyError(f"p={policy.p!r}: use a share of attention above 0, at most 1")
    for name, choices in CHOICES.items():
        if getattr(policy, name) not in choices:
            raise PolicyError(f"unknown {name}={getattr(policy, name)!r}: use {', '.join(choices)}")
    for name, least in (("lower", 0), ("upper", 0), ("interval", 1), ("queries", 0)):
        check_whole(name, getattr(policy, name), least)
    check_whole("pool", policy.pool, 1, MOST_POOLED)
    if policy.lower > policy.upper:
        raise PolicyError(f"lower={policy.lower} is above upper={policy.upper}: votes come before a rewrite")
    if policy.pool % 2 == 0:
        raise PolicyError(f"pool={policy.pool}: use an odd number of positions, a token and as many on either side")
    if policy.queries == 0 and policy.metric != "accumulated":
        raise PolicyError(f"queries=0: metric={policy.metric} needs the last queries, only accumulated does without")
    for name in ("memory", "sparse_loading"):
        if not isinstance(getattr(policy, name), bool):
            raise PolicyError(f"{name}={getattr(policy, name)!r}: use true or false")
    _check_budget(policy)
    _check_format(policy.format)


def _check_budget(policy: HardKV) -> None:
    near = policy.window + policy.sinks
    if isinstance(policy.budget, int) and policy.budget < near:
        raise PolicyError(
            f"budget={policy.budget} is below window + sinks = {near} tokens, which every head keeps: raise it"
        )
    if isinstance(policy.budget, str) and policy.layout == "max":
        raise PolicyError("layout=max pads heads beyond a budget in bytes: give a budget in tokens, or none")
    if policy.select == "topk" and (not isinstance(policy.budget, int) or policy.memory):
        raise PolicyError("select=topk keeps a fixed number of tokens: give a budget in tokens, and no memory")


def _check_format(name: str) -> None:
    if not isinstance(name, str):
        raise PolicyError(f"format={name!r}: use dense or the name of a format, such as k8v4")
    if name != "dense" and TierFormat.parse(name).key_bits < 4:
        raise PolicyError(f"format={name}: keys of fewer than 4 bits destroy a model, keep fewer tokens instead (p)")
