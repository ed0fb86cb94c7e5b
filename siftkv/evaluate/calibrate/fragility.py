"""Which heads lose what when keys are kept at 4 bits: measured on a prompt's own queries, without running a cache.

For a query `q` and the keys `k` before it, quantised as a cache quantises them (conditioned, by token), the logit error
is `e = q . (k_quantised - k) / sqrt(D)`. Three figures a head, means over queries of the prompt's second half:

- `error`, in nats: the root mean square of `e`, weighted by attention;
- `relative`: `error` by the standard deviation of the logits;
- `shift`, in nats: KL from exact attention to attention with the error. It is about half the variance of `e` under
  attention, so it grows with the square of `error`, and says how much an error matters: a head that looks at one
  token alone can afford more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from siftkv.attention import causal_attention
from siftkv.kernels.reference.condition import condition_keys, plain_keys
from siftkv.kernels.reference.quantize import quantise_groups
from siftkv.kernels.state import Conditioning
from siftkv.models import Decoder

_ROWS = 128
_SINKS = 4
"""First tokens, which policies keep at 16 bits."""

OUTLYING = 4.0
"""A head is fragile when its shift is above this many times the median head's, and its error above `NOTICEABLE`."""

NOTICEABLE = 0.1
"""Nats: attention weights that are off by a tenth."""


@dataclass(frozen=True)
class Fragility:
    """fp64 `[L, H]` each, see above; on the CPU."""

    error: Tensor
    relative: Tensor
    shift: Tensor

    def ranked(self) -> list[tuple[int, int]]:
        """(layer, kv head) of all heads, the largest shift first."""
        heads = self.shift.shape[1]
        return [(int(i) // heads, int(i) % heads) for i in self.shift.flatten().argsort(descending=True, stable=True)]

    def fragile(self) -> list[tuple[int, int]]:
        """(layer, kv head) of heads whose keys stand out, the worst first."""
        limit = OUTLYING * float(self.shift.median())
        return [at for at in self.ranked() if float(self.shift[at]) > limit and float(self.error[at]) > NOTICEABLE]


@torch.inference_mode()
def measure_fragility(
    decoder: Decoder, conditioning: Conditioning, token_ids: Sequence[int], bits: int = 4
) -> Fragility:
    """Run a prompt of at least 16 tokens once, and look at every head's keys.

    conditioning: that of the cache, whose tables are at least as long as the prompt.
    """
    found: list[Tensor] = []
    length = len(token_ids)
    device = decoder.device
    rows = torch.linspace(length // 2, length - 1, min(_ROWS, length - length // 2), device=device).long()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        off = _key_error(conditioning, layer, k.float(), bits)  # [T, H, D]
        off[:_SINKS] = 0
        queries = q[rows].float().unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5  # [M, H, G, D]
        found.append(torch.stack([_head(queries[:, h], k[:, h].float(), off[:, h], rows) for h in range(k.shape[1])]))
        out: Tensor = causal_attention(q, k, v)[0]
        return out

    lengths = torch.full((length,), length, device=device)
    decoder(torch.tensor(list(token_ids), device=device), torch.arange(length, device=device), attend, lengths)
    return Fragility(*torch.stack(found).double().cpu().unbind(-1))


def _key_error(c: Conditioning, layer: int, k: Tensor, bits: int) -> Tensor:
    """What quantising does to plain keys fp32 `[T, H, D]`, in the plain basis."""
    position = torch.arange(len(k), device=k.device)[:, None]
    bias = c.bias[layer].to(k.device)
    stored = condition_keys(c, k, bias, position)
    codes, scale, zero = quantise_groups(stored, bits, 1)
    return plain_keys(c, codes * scale + zero, bias, position) - k


def _head(q: Tensor, k: Tensor, off: Tensor, rows: Tensor) -> Tensor:
    """error, relative, shift, fp32 `[3]`, of one head: scaled q `[M, G, D]` at `rows`, k and its error `[T, D]`."""
    unseen = torch.arange(len(k), device=k.device) > rows[:, None, None]  # [M, 1, T]
    logits = torch.einsum("mgd,td->mgt", q, k)
    error = torch.einsum("mgd,td->mgt", q, off)
    exact = logits.masked_fill(unseen, -torch.inf).log_softmax(-1)
    rough = (logits + error).masked_fill(unseen, -torch.inf).log_softmax(-1)
    weight = exact.exp()
    shift = (weight * (exact - rough)).masked_fill(unseen, 0.0).sum(-1).mean()
    size = (weight * error.square()).sum(-1).mean().sqrt()
    count = (~unseen).sum(-1)
    mean = logits.masked_fill(unseen, 0.0).sum(-1) / count
    spread = ((logits - mean[..., None]).masked_fill(unseen, 0.0).square().sum(-1) / count).mean().sqrt()
    return torch.stack([size, size / spread.clamp_min(1e-12), shift])
