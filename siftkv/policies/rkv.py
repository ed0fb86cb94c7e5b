"""`rkv`: of a prompt, what is looked at and not said again later.

Source: "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models" (arXiv 2505.24133), with the
constants of its authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.errors import PolicyError
from siftkv.policies.base import PromptView
from siftkv.policies.budgets import PromptBudget
from siftkv.policies.hardkv.metrics import redundancy
from siftkv.policies.scores import check_pool, pooled


@dataclass(frozen=True)
class RKV(PromptBudget):
    """Keep the last `window` tokens of a prompt and, of those before, the best by
    `share * attention - (1 - share) * softmax(similarity)`.

    Attention is the softmax, over the tokens before the window, of each of its queries (the maximum over a group of
    query heads), averaged and pooled over `kernel` neighbours. Similarity is a key's mean cosine with the head's
    others; of those closer than `alike` the last is spared. Selects from the prompt only: `hardkv:metric=rkv` goes on
    while decoding.

    ratio, budget, format, window, sinks: as in every budget policy; see `siftkv.policies.budgets.PromptBudget`.
    """

    name: ClassVar[str] = "rkv"

    window: int = 8
    share: float = 0.07
    kernel: int = 7
    alike: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pool(self.kernel, "max")
        for name in ("share", "alike"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise PolicyError(f"{name}={value!r}: use a number between 0 and 1")

    def importance(self, prompt: PromptView) -> Tensor:
        if prompt.q is None or prompt.k is None:
            return prompt.score
        length, before = prompt.length, max(0, prompt.length - self.window)
        keys = prompt.k.float().transpose(1, 2)  # [R, H, n, D]
        query = prompt.q[:, before:].float().unflatten(2, (keys.shape[1], -1))  # [R, W, H, G, D]
        logits = torch.einsum("rwhgd,rhnd->rhgwn", query, keys[:, :, :before]).amax(2) * keys.shape[-1] ** -0.5
        attention = pooled(logits.softmax(-1).mean(-2), self.kernel, "max")
        known = torch.ones(keys.shape[1], length, dtype=torch.bool, device=keys.device)
        similarity = torch.stack([redundancy(own, known, self.alike) for own in keys]).softmax(-1)
        mixed = self.share * attention - (1 - self.share) * similarity[..., :before]
        return F.pad(mixed, (0, length - before))
