"""`diffkv`: keys kept more precisely than values, each token at high precision, at low precision or dropped, by its
importance.

Source: "DiffKV: Differentiated Memory Management for Large Language Models with Parallel KV Compaction" (SOSP 2025,
arXiv 2412.03131), section 4. What differs from the paper, on purpose: the recent window is kept at 16 bits; the first
`sinks` tokens are never dropped (sinks=0 is the paper); keys are conditioned before they are quantised (a setting of
the engine, not of the policy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.formats import Tier, TierFormat
from siftkv.policies.base import (
    DROPPED,
    UNLIMITED,
    DecodeRule,
    Policy,
    PromptView,
    Setting,
    check_pair,
    check_whole,
    check_window,
    expand,
)
from siftkv.policies.importance import observation_rows, sampled_rows


@dataclass(frozen=True)
class DiffKV(Policy):
    """DiffKV's three fates of a token.

    A prompt token at position `i` whose mean attention from later queries is at least `alpha_high / (i + 1)` is kept in
    format `high`, one that reaches `alpha_low / (i + 1)` in format `low`, others are dropped. At each decode step the
    token that leaves the window is classed against `alpha / N`, then the weakest token of the tier it entered is
    examined and moves down if it falls short.

    alpha_high, alpha_low: one number, one a layer, or one a layer and kv head; 0 <= alpha_low <= alpha_high.
        alpha_low=0 never drops.
    window: recent tokens at 16 bits. sinks: first tokens at 16 bits, never dropped.
    importance: `all` = mean over all later queries, `window` = over the last `observe` queries of the prompt.
    sample: with `all`, the prompt's mean is estimated from every `sample`-th query row and all of the last 256; 1 =
        every row.
    interval: scores are refreshed at every `interval`-th position while decoding; 1 = the paper. Never less often than
        once in `window` positions, so that no token leaves the window unmeasured.
    catch_up: 1 = in each step the weakest token of every tier is examined, also where no token entered, so that pages
        shrink as thresholds pass tokens by.
    """

    name: ClassVar[str] = "diffkv"
    positional: ClassVar[bool] = True

    alpha_high: Setting = 1.0
    alpha_low: Setting = 0.02
    high: str = "k8v4"
    low: str = "k4v2"
    window: int = 64
    sinks: int = 4
    importance: Literal["all", "window"] = "all"
    sample: int = 8
    observe: int = 64
    interval: int = 8
    catch_up: int = 0

    def __post_init__(self) -> None:
        check_window(self.window, self.sinks)
        for name in ("sample", "observe", "interval"):
            check_whole(name, getattr(self, name), 1)
        if self.catch_up not in (0, 1):
            raise PolicyError(f"catch_up={self.catch_up}: use 0 or 1")
        if self.importance not in ("all", "window"):
            raise PolicyError(f"importance={self.importance!r}: use all or window")
        self._check_thresholds()
        check_pair(self.high, self.low)

    def _check_thresholds(self) -> None:
        high, low = (_column(name, getattr(self, name)) for name in ("alpha_high", "alpha_low"))
        for name, value in (("alpha_high", high), ("alpha_low", low)):
            if not bool(torch.isfinite(value).all()) or bool((value < 0).any()):
                raise PolicyError(f"{name}={getattr(self, name)}: use a finite number, 0 or more")
        try:
            above = bool((low > high).any())
        except RuntimeError:
            raise PolicyError("alpha_high and alpha_low have shapes that do not fit together") from None
        if above:
            raise PolicyError(
                f"alpha_low={self.alpha_low} is above alpha_high={self.alpha_high}: "
                "a token would be dropped before it is demoted"
            )

    def tiers(self, dense: str) -> tuple[Tier, ...]:
        return (Tier(TierFormat.parse(self.high)), Tier(TierFormat.parse(self.low)))

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        return (
            observation_rows(length, self.observe) if self.importance == "window" else sampled_rows(length, self.sample)
        )

    def classify(self, prompt: PromptView) -> Tensor:
        relative = prompt.score * (prompt.position + 1)
        tier = torch.full(prompt.score.shape, DROPPED, dtype=torch.int8, device=prompt.score.device)
        for index, setting in reversed(list(enumerate((self.alpha_high, self.alpha_low)))):
            tier[relative >= _threshold(setting, prompt.layer, relative)] = index
        return tier

    def decode_rule(self, num_layers: int, num_kv_heads: int) -> DecodeRule:
        alpha = [expand(getattr(self, name), name, num_layers, num_kv_heads) for name in ("alpha_high", "alpha_low")]
        stacked = torch.stack(alpha, -1)
        return DecodeRule(stacked, torch.full(stacked.shape, UNLIMITED), min(self.interval, self.window), self.catch_up)


def _column(name: str, setting: Setting) -> Tensor:
    """A threshold as fp64, one a layer as a column, so that it lines up with one a layer and head."""
    try:
        value = torch.as_tensor(setting, dtype=torch.float64)
    except (TypeError, ValueError):
        raise PolicyError(f"{name}={setting!r}: use a number, one a layer, or one a layer and kv head") from None
    return value[:, None] if value.ndim == 1 else value


def _threshold(setting: Setting, layer: int, relative: Tensor) -> Tensor | float:
    """What scores `[..., H, n]` of one layer are compared with: a number, or fp32 `[H, 1]`; a single row or column
    stands for all, as in `expand`. A GPU's host does not wait for its copy.
    """
    value = torch.as_tensor(setting, dtype=torch.float32)
    if value.ndim == 0:
        return float(value)
    value = value[min(layer, len(value) - 1)].expand(relative.shape[-2])[:, None].contiguous()
    if relative.device.type != "cuda":
        return value.to(relative.device)
    return value.pin_memory().to(relative.device, non_blocking=True)
