"""A policy bound to a pool: its tiers become the pool's, its rule becomes tensors of the right shape."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from siftkv.cache import CacheSpec, SlotRule, dense_name
from siftkv.errors import PolicyError
from siftkv.kernels.ranking import WorthRule
from siftkv.policies import Policy, PromptView
from siftkv.policies.base import Prices, RankedPrompts, Sifted

_RING_ENTRY = 4
"""Bytes of a page's entry in the free ring."""


def policy_key(policy: Policy) -> Hashable:
    """The policy itself where it can be hashed, else (settings that are lists or tensors) what it holds, as text."""
    try:
        hash(policy)
    except TypeError:
        held = [x.tolist() if isinstance(x, Tensor) else x for x in vars(policy).values()]
        return policy.name, repr(held)
    return policy


class BoundPolicy:
    """What the engine needs of a policy for one model and pool.

    Raises FormatError when the policy needs a format that the pool was not opened with, PolicyError when its window or
    sinks do not fit. costs: of layers, as in `Prices`.
    """

    def __init__(self, policy: Policy, spec: CacheSpec, costs: tuple[float, ...] = ()) -> None:
        self.name = policy.describe()
        self.key: Hashable = policy_key(policy)
        """What policies that behave alike have in common."""
        if policy.any_window and policy.window > spec.max_window:
            policy = replace(policy, window=spec.max_window)  # type: ignore[type-var]
        self.policy = policy
        self._tiers = [spec.tier_index(tier) for tier in policy.tiers(dense_name(spec.dtype))]
        if policy.window > spec.max_window or policy.sinks > spec.sink_rows:
            raise PolicyError(
                f"{policy.name}: window={policy.window}, sinks={policy.sinks} do not fit this engine "
                f"(at most {spec.max_window} and {spec.sink_rows}): "
                "open it with larger max_window or sink_rows"
            )
        if policy.query_rows > spec.query_rows or policy.skips > spec.skips:
            raise PolicyError(
                f"{policy.name} reads {policy.query_rows} recent queries{' and skips pages' * policy.skips}, for which "
                "this engine has no room: open it with that policy as its default"
            )
        policy.check_context(spec.max_len)
        if sorted(self._tiers) != self._tiers:
            raise PolicyError(f"{policy.name}: its tiers must go from more to less precise formats")
        self._pool_tier = torch.tensor([*self._tiers, -1], dtype=torch.int8)  # index -1 stays "dropped"
        self._pool_size = len(spec.tiers)
        self._prices = self._price(spec, costs)
        policy.check_prices(self._prices)
        self.rule = self._slot_rule(spec)
        self.tiers_used = len(self._tiers)
        self.tokens_a_page = min(spec.layouts[t].tokens for t in self._tiers)
        """Of the tier with the largest tokens: the worst case for admission."""

    @property
    def pool_tiers(self) -> tuple[int, ...]:
        """The pool's index of each of the policy's tiers."""
        return tuple(self._tiers)

    def _slot_rule(self, spec: CacheSpec) -> SlotRule:
        own = self.policy.decode_rule(spec.num_layers, spec.num_kv_heads)
        shape = (spec.num_layers, spec.num_kv_heads, len(spec.tiers))
        alpha, cap = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
        share = None if own.share is None else torch.full(shape, torch.inf)
        for index, tier in enumerate(self._tiers):
            alpha[..., tier], cap[..., tier] = own.alpha[..., index], own.cap[..., index]
            if share is not None and own.share is not None:
                share[..., tier] = own.share[..., index]
        window, sinks = self.policy.window, self.policy.sinks
        rule = SlotRule(window, sinks, alpha, cap, own.refresh, own.catch_up, share, own.horizon)
        rule.check(spec)
        return rule

    def rows(self, length: int) -> tuple[Tensor, Tensor] | None:
        """Query rows and weights that the policy's importance is measured from, or None."""
        return self.policy.rows(length)

    def classify(self, prompt: PromptView) -> Tensor:
        """Pool tier (int8 `[R, H, n]`, -1 = dropped) of each token of `prompt`."""
        return self.sift(prompt).tier

    def sift(self, prompt: PromptView) -> Sifted:
        """What the policy makes of `prompt`, in the pool's tiers: tier int8 `[R, H, n]`, share fp32 `[R, H, T]`."""
        return self._in_pool(self.policy.sift(prompt, self._prices))

    @property
    def positional(self) -> bool:
        """Whether prompts of any lengths may be classed as one."""
        return self.policy.positional

    @property
    def padded(self) -> bool:
        """Whether prompts of different lengths may be classed together, padded to the longest."""
        return self.policy.padded

    @property
    def worth_rule(self) -> WorthRule | None:
        """What kernels may rank tokens by, so that `sift_ranked` takes `sift`'s place."""
        return self.policy.worth_rule

    def sift_ranked(self, prompts: RankedPrompts) -> Sifted:
        """`sift` of prompts that kernels rank: tier int8 `[H, T']`, share fp32 `[R, H, T]`."""
        return self._in_pool(self.policy.sift_ranked(prompts, self._prices))

    def _in_pool(self, own: Sifted) -> Sifted:
        if self._tiers == list(range(self._pool_size)):
            return own
        if self._pool_tier.device != own.tier.device:
            self._pool_tier = self._pool_tier.to(own.tier.device)
        share = None
        if own.share is not None:
            share = own.share.new_full((*own.share.shape[:-1], self._pool_size), torch.inf)
            for index, tier in enumerate(self._tiers):  # a list of indices would be copied to a GPU, and waited for
                share[..., tier] = own.share[..., index]
        return Sifted(self._pool_tier[own.tier.long()], own.score, share)

    def _price(self, spec: CacheSpec, costs: tuple[float, ...]) -> Prices:
        tokens = [spec.layouts[tier].tokens for tier in self._tiers]
        slot = spec.slot_bytes / spec.head_slots
        page = spec.page_bytes + _RING_ENTRY
        return Prices(tuple(page / n for n in tokens), page, slot, spec.head_dim * 2 * 2, costs)
