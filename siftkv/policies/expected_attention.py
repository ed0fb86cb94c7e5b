"""`expected`: of a prompt, what queries that are still to come should look at, in closed form.

Source: "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution" (arXiv
2510.00636). Queries before rotation are taken as normal, with the prompt's mean and covariance; a key's expected
exponential attention is `exp(k.mu / sqrt(D) + k' S k / 2D)` with mu and S turned by the mean rotation of the next
positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from siftkv.errors import PolicyError
from siftkv.policies.base import PromptView, check_whole
from siftkv.policies.budgets import PromptBudget


@dataclass(frozen=True)
class ExpectedAttention(PromptBudget):
    """Keep the tokens with the largest expected attention times value norm.

    future: next positions over which the rotation is averaged. covariance: whether the queries' spread counts, not only
        their mean. value_norm: whether expected attention is weighted by `|v|`; epsilon: added to it before.
    ratio, budget, format, window: as in every budget policy; see `siftkv.policies.budgets.PromptBudget`. sinks: first
        tokens, kept, and left out of the queries' statistics.
    """

    name: ClassVar[str] = "expected"

    window: int = 1
    sinks: int = 4
    future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("future", self.future, 1)
        if not self.epsilon >= 0:
            raise PolicyError(f"epsilon={self.epsilon}: use 0 or more")

    def importance(self, prompt: PromptView) -> Tensor:
        if prompt.q is None or prompt.k is None or prompt.v is None or prompt.rotary is None:
            return prompt.score
        keys = prompt.k.float().transpose(1, 2)  # [R, H, n, D]
        heads, dim = keys.shape[1], keys.shape[-1]
        query = unrotated(prompt.q.float(), *prompt.rotary)[:, min(self.sinks, prompt.length - 1) :]
        mean = query.mean(1)  # [R, Hq, D]
        turn = mean_rotation(*prompt.rotary, prompt.length, self.future)
        centre = (mean @ turn.T).unflatten(1, (heads, -1))  # [R, H, G, D]
        logits = torch.einsum("rhgd,rhnd->rhgn", centre, keys) * dim**-0.5
        if self.covariance:
            off = (query - mean[:, None]).transpose(1, 2)  # [R, Hq, m, D]
            spread = (turn @ (off.mT @ off / off.shape[2]) @ turn.T).unflatten(1, (heads, -1))  # [R, H, G, D, D]
            for member in range(spread.shape[2]):
                logits[:, :, member] += ((keys @ spread[:, :, member]) * keys).sum(-1) / (2 * dim)
        logits[..., : self.sinks] = -torch.inf
        expected = logits.softmax(-1).nan_to_num(0.0).mean(2)
        if self.value_norm:
            expected = (expected + self.epsilon) * prompt.v.float().norm(dim=-1).transpose(1, 2)
        return expected


def unrotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries before rotation: q fp32 `[R, n, Hq, D]` of positions 0 to n - 1.

    cos, sin: fp32 `[P, D/2]`; a factor that they carry (YaRN) is taken out.
    """
    cos, sin = (x[: q.shape[1], None] for x in (cos, sin))
    low, high = q.chunk(2, -1)
    turned = torch.cat([low * cos + high * sin, high * cos - low * sin], -1)
    return turned / (cos.square() + sin.square()).repeat(1, 1, 2)


def mean_rotation(cos: Tensor, sin: Tensor, start: int, count: int) -> Tensor:
    """Mean rotation matrix, fp32 `[D, D]`, of the `count` positions from `start` on, as far as the tables reach."""
    first = min(start, len(cos) - 1)
    c, s = (x[first : start + count].mean(0).diag() for x in (cos, sin))
    return torch.cat([torch.cat([c, -s], 1), torch.cat([s, c], 1)])
