"""What each layer's prompt tokens are worth to a model's answers, measured once on a short text that comes with us.

Layers differ by two orders of magnitude in what the answers lose where a layer loses tokens. So a text is read once,
and its last tokens again for every layer, which alone does without the tokens that are worth least to it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from siftkv.engine.foreign import TOKENIZER
from siftkv.kernels.fused import add_rms_norm
from siftkv.models.decoder import Decoder
from siftkv.models.layer import DecoderLayer
from siftkv.models.statistics import sample_ids
from siftkv.policies.worth import mean_squares, pooled

_PROMPT, _ASKED = 1536, 64
"""Tokens of the text, and of those that follow it and are asked. In short texts other layers matter."""
_LEAST_PROMPT, _LEAST_KINDS = 256, 64
"""Tokens of a text that says something about layers, and different ones among them."""
_KEPT = 0.25
"""Of a layer's tokens: what is lost must stand out from the rounding of 16 bits, which fp32 here only lessens."""
_SINKS, _RECENT = 4, 16
_OBSERVED = 256
"""Queries that tell what a prompt's tokens are worth."""


def layer_costs(decoder: Decoder, tokenizer: object) -> tuple[float, ...]:
    """KL in nats a token, a number a layer, measured where it is not known yet; empty where the tokenizer takes no text
    or the model no prompt of that length.
    """
    if decoder.layer_costs is None:
        config = decoder.config
        with TOKENIZER:
            ids = sample_ids(tokenizer, config.vocab_size, min(_PROMPT + _ASKED, config.context_limit))
        enough = len(ids) >= _LEAST_PROMPT + _ASKED and len(set(ids)) >= _LEAST_KINDS
        decoder.layer_costs = tuple(measure_layers(decoder, ids, _ASKED).tolist()) if enough else ()
    return decoder.layer_costs


@torch.inference_mode()
def measure_layers(decoder: Decoder, token_ids: Sequence[int], asked: int) -> Tensor:
    """fp32 `[L]`: mean KL over the last `asked` tokens of a text where a layer alone has lost three quarters of the
    tokens before them.

    In fp32, a layer's weights at a time. Rows: the prompt, the asked tokens, and those once more for each layer that
    has run so far, with what that one has lost.
    """
    config, device, start = decoder.config, decoder.device, len(token_ids) - asked
    ids, position = torch.tensor(list(token_ids), device=device), torch.arange(len(token_ids), device=device)
    cos, sin = decoder.rotary.gather(position, torch.full_like(position, len(token_ids)))
    x = F.embedding(ids, decoder.embedding).float()
    for plain in decoder.layers:
        layer = _widened(plain)
        normed = torch.rms_norm(x, (x.shape[-1],), layer.input_norm, config.rms_norm_eps)
        copies = len(x[start:]) // asked
        turn = (torch.cat([t[:start], t[start:].repeat(copies, 1, 1)]) for t in (cos, sin))
        attended = _attend(*layer.project(normed, *turn), start, asked)
        x = torch.cat([x, x[start : start + asked]])
        x, normed = add_rms_norm(x, layer.output(attended), layer.mlp_norm, config.rms_norm_eps)
        x = x + layer.mlp(normed)
    norm, head = decoder.final_norm.float(), decoder.head.float()
    rows = torch.rms_norm(x[start:], (x.shape[-1],), norm, config.rms_norm_eps).split(asked)
    exact = F.linear(rows[0], head).log_softmax(-1)
    return torch.stack([_divergence(exact, F.linear(row, head).log_softmax(-1)) for row in rows[1:]])


def _widened(layer: DecoderLayer) -> DecoderLayer:
    wide = copy.copy(layer)
    for name, weight in layer.parameters().items():
        setattr(wide, name, weight.float())
    return wide


def _divergence(exact: Tensor, other: Tensor) -> Tensor:
    return (exact.exp() * (exact - other)).sum(-1).mean()


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int, asked: int) -> Tensor:
    """q `[start + C asked, Hq, D]`, k, v with H heads -> `[start + (C + 1) asked, Hq, D]`: last, the first copy without
    what the prompt has lost.
    """
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    past = [t[:start] for t in (q, k, v)]
    own = [t[start:].unflatten(0, (-1, asked)) for t in (q, k, v)]
    own = [torch.cat([t, t[:1]]) for t in own]  # [C + 1, asked, heads, D]
    seen = torch.ones(asked, start + asked, dtype=torch.bool, device=q.device).tril(start)
    seen = seen.repeat(len(own[0]), heads * group, 1, 1)
    seen[-1, :, :, :start] = _kept(*past).repeat_interleave(group, 0)[:, None]
    keys, values = (torch.cat([p.expand(len(o), *p.shape), o], 1) for p, o in zip(past[1:], own[1:], strict=True))
    keys, values = (t.repeat_interleave(group, 2).transpose(1, 2) for t in (keys, values))
    late = F.scaled_dot_product_attention(own[0].transpose(1, 2), keys, values, attn_mask=seen)
    keys, values = (t.repeat_interleave(group, 1).transpose(0, 1) for t in past[1:])
    early = F.scaled_dot_product_attention(past[0].transpose(0, 1), keys, values, is_causal=True)
    return torch.cat([early.transpose(0, 1), late.transpose(1, 2).flatten(0, 1)])


def _kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q `[n, Hq, D]`, k, v `[n, H, D]`; bool `[H, n]`: the layer's tokens that are worth most, as `sift` sees it."""
    recent, distant = mean_squares(q[None], k[None], _OBSERVED, _OBSERVED)
    worth = (pooled(recent, 5) + 0.3 * distant)[0] * v.square().sum(-1).mT
    worth[:, :_SINKS], worth[:, -_RECENT:] = torch.inf, torch.inf
    return worth > worth.flatten().kthvalue(int((1 - _KEPT) * worth.numel())).values
