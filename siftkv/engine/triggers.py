"""What a trigger of Hard-KV did, kept a request for reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from siftkv.policies.hardkv.calibration import HeadCalibration


@dataclass(frozen=True)
class Trigger:
    """One trigger of one request. Tensors `[L, H]` may live on the cache's device: they are read when asked for.

    position: tokens that the request had seen. rewritten: whether tokens without a place were to be taken away; else
        only votes were counted. done: bool (or one on the device), whether a rewrite found the pages that it needed;
        else tokens were left where they were.
    selected: int, tokens that each head's votes hold, window and sinks included. kept: int, tokens that each head has
        after the trigger: those and, where nothing was taken away, the others. coverage: fp32, share of the voting
        queries' attention that the selected tokens hold. calibration: temperatures fp32 `[L, H]`, where they are used.
    """

    position: int
    rewritten: bool
    done: bool | Tensor
    selected: Tensor
    kept: Tensor
    coverage: Tensor
    calibration: HeadCalibration | None = None

    @property
    def deferred(self) -> bool:
        """Whether a rewrite was left to the next trigger, for want of pages."""
        return self.rewritten and not bool(self.done)

    @property
    def utilisation(self) -> float:
        """Overall over largest: mean of the selected tokens a head by those of the longest head; 1 = all heads select
        the same number (Hard-KV, arXiv 2606.28831, section 3.3).
        """
        longest = float(self.selected.max())
        return float(self.selected.float().mean()) / longest if longest else 1.0

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON types."""
        calibration = self.calibration and {
            name: getattr(self.calibration, name).tolist() for name in ("temperature", "error", "drift")
        }
        return {
            "position": self.position,
            "rewritten": self.rewritten,
            "deferred": self.deferred,
            "utilisation": self.utilisation,
            "selected": self.selected.tolist(),
            "kept": self.kept.tolist(),
            "coverage": self.coverage.tolist(),
            "calibration": calibration,
        }
