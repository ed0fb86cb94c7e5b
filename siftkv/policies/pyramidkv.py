"""`pyramidkv`: SnapKV with budgets that fall from layer to layer.

Source: "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" (arXiv 2406.02069), with the
whole-number arithmetic of its authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from siftkv.policies.base import PromptView, check_whole
from siftkv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV whose budget beyond the window falls linearly over the layers: from `2b - b / beta` in the first to
    `b / beta` in the last, where `b` is the mean.

    beta: how steep, 1 = all layers alike. The first layer never asks for more than the prompt has.
    ratio, budget, format, window, sinks, kernel, pooling: as in `snapkv`.
    """

    name: ClassVar[str] = "pyramidkv"

    window: int = 8
    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("beta", self.beta, 1)

    def counts(self, prompt: PromptView, score: Tensor) -> int:
        return self.of_layer(prompt.length, prompt.layer, prompt.layers)

    def of_layer(self, length: int, layer: int, layers: int) -> int:
        """Tokens that a head of one of `layers` layers keeps of a prompt of `length` beyond window and sinks."""
        mean, there = self.beyond(length), max(0, length - self.window - self.sinks)
        if mean >= there or layers < 2:
            return mean
        least = mean // self.beta
        most = 2 * mean - least
        if most >= there:
            most, least = there, 2 * mean - there
        return most - layer * ((most - least) // (layers - 1))
