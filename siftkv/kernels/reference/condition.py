"""Key conditioning: `k' = (k - RoPE_p(b_r)) @ rotation` where a key enters a quantised tier, undone exactly in the
logits.

    q . k = (q @ rotation) . k' + q . RoPE_p(b_r)

because the rotation is orthogonal. The second term depends on the query and the position only:
`sum over kept pairs j of A_j cos(p theta_j) + B_j sin(p theta_j)` with A, B computed once a query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.kernels.state import Conditioning


def rotated_bias(c: Conditioning, bias: Tensor, position: Tensor) -> Tensor:
    """`RoPE_p(bias)`: bias `[..., D]` fp32 and position `[...]` int64, broadcast together, to `[..., D]`."""
    half = bias.shape[-1] // 2
    cos, sin = c.cos[position], c.sin[position]
    low, high = bias[..., :half], bias[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def condition_keys(c: Conditioning, k: Tensor, bias: Tensor, position: Tensor) -> Tensor:
    """Conditioned keys fp32 `[..., D]` of plain keys `k` `[..., D]`; `bias` and `position` broadcast against them."""
    if c.has_bias:
        k = k - rotated_bias(c, bias, position)
    return k @ c.rotation if c.rotates else k


def plain_keys(c: Conditioning, k: Tensor, bias: Tensor, position: Tensor) -> Tensor:
    """Inverse of `condition_keys`: plain keys fp32 `[..., D]` of conditioned ones."""
    k = k @ c.rotation.T if c.rotates else k
    if c.has_bias:
        k = k + rotated_bias(c, bias, position)
    return k


def bias_logits(c: Conditioning, q: Tensor, bias: Tensor, position: Tensor) -> Tensor:
    """`q . RoPE_p(b_r)`: q `[B, H, G, D]`, bias `[H, D]`, position `[B, H, n]` to fp32 `[B, H, G, n]`, unscaled."""
    half = bias.shape[-1] // 2
    low, high = bias[:, None, :half], bias[:, None, half:]
    a = q[..., :half] * low + q[..., half:] * high
    b = q[..., half:] * low - q[..., :half] * high
    return torch.einsum("bhgj,bhnj->bhgn", a, c.cos[position]) + torch.einsum("bhgj,bhnj->bhgn", b, c.sin[position])
