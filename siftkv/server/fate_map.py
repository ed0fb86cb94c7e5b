"""Where every token of a running request stands in all its heads at once, as text: one character a token."""

from __future__ import annotations

import torch
from torch import Tensor

from siftkv.cache import KVCache
from siftkv.kernels.reference.tokens import page_of, pool_as, state_addresses

DROPPED = "."
WINDOW = "w"
UNKNOWN = "?"
"""Kept in a tier that stores no positions while others of the head are not: which token it is cannot be told."""

_DROPPED, _UNKNOWN = -1, -2


def legend(cache: KVCache) -> dict[str, str]:
    """What each character of `fate_map` stands for."""
    tiers = {str(index): tier.name for index, tier in enumerate(cache.spec.tiers)}
    return tiers | {WINDOW: "window", DROPPED: "dropped", UNKNOWN: "unknown"}


def fate_map(cache: KVCache, slot: int) -> list[list[str]]:
    """Strings `[L][H]` of one character a token so far: the digit of its tier, or one of this module's letters."""
    codes = _codes(cache, slot).cpu()
    letters = {code: str(code) for code in range(len(cache.spec.tiers))}
    letters |= {len(cache.spec.tiers): WINDOW, _DROPPED: DROPPED, _UNKNOWN: UNKNOWN}
    table = bytearray(b"?" * 256)
    for code, letter in letters.items():
        table[code & 255] = ord(letter)
    return [[head.numpy().tobytes().translate(table).decode("ascii") for head in layer] for layer in codes]


def _codes(cache: KVCache, slot: int) -> Tensor:
    """int8 `[L, H, seen]`: tier, the number of tiers for the window, -1 dropped, -2 unknown."""
    state, spec = cache.state, cache.spec
    seen = int(state.seen[slot])
    position = torch.arange(seen, device=state.pages.device)
    near = (position < state.sinks[slot]) | (position >= state.window_start[slot])
    fate = torch.full((spec.num_layers, spec.num_kv_heads, seen), _DROPPED, dtype=torch.int8, device=near.device)
    for tier in range(len(spec.tiers)):
        length = state.lengths[slot, :, :, tier].long()  # [L, H]
        if state.layouts[tier].tier.positions:
            _place(cache, slot, tier, length, fate)
        else:
            far = ~near & (length > 0)[..., None]
            everything = (length == (~near).sum())[..., None]
            fate = torch.where(far & everything, tier, torch.where(far, _UNKNOWN, fate)).to(torch.int8)
    fate[..., near] = len(spec.tiers)
    return fate


def _place(cache: KVCache, slot: int, tier: int, length: Tensor, fate: Tensor) -> None:
    """Write `tier` at the positions that its pages store; `length` int64 `[L, H]`, `fate` int8 `[L, H, seen]`."""
    state = cache.state
    most = int(length.max()) if length.numel() else 0
    if most == 0 or fate.shape[-1] == 0:
        return
    index = torch.arange(most, device=length.device).expand(*length.shape, most)
    page = page_of(state, state.page_table[slot], tier, index)
    _, address = state_addresses(state, tier, page, index)
    position = pool_as(state, torch.int32)[address].long().clamp(0, fate.shape[-1] - 1)  # [L, H, n]
    layer, head, token = torch.nonzero(index < length[..., None], as_tuple=True)
    fate[layer, head, position[layer, head, token]] = tier
