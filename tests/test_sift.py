"""The decode policy step against a model of it that a person can follow: lists of tokens, one head at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from siftkv.cache import KVCache
from siftkv.kernels.reference.attention import tier_tokens
from siftkv.kernels.reference.prompt import prompt_importance
from siftkv.kernels.reference.quantize import decode
from siftkv.kernels.reference.scores import updated_mean
from siftkv.kernels.reference.tokens import read_records
from siftkv.kernels.state import CacheState
from siftkv.policies.importance import observation_rows, sampled_rows
from tests.tiny import ThreeTiers, random_prompt, random_step, small_cache


@dataclass
class Token:
    position: int
    score: float


def tokens_of(cache: KVCache, slot: int, layer: int, head: int) -> list[list[Token]]:
    """What stands in each tier of a head, in slot order, read from the pages."""
    out = []
    for tier, layout in enumerate(cache.spec.layouts):
        index, page, valid = tier_tokens(cache.state, layer, torch.tensor([slot]), tier)
        record = read_records(cache.state, tier, page, index.expand_as(page))
        _, _, score, position = decode(layout, record)
        keep = valid[0, head]
        out.append([Token(int(p), float(s)) for p, s in zip(position[0, head][keep], score[0, head][keep])])
    return out


def model_cascade(
    tiers: list[list[Token]], carried: Token | None, alpha: list[float], cap: list[int], seen: int, examine: bool
) -> None:
    for tier, threshold, most in zip(tiers, [a / seen for a in alpha], cap):
        weakest = min(range(len(tier)), key=lambda i: tier[i].score, default=None)
        low = tier[weakest].score if weakest is not None else float("inf")
        if carried is not None:
            if most <= 0 or carried.score < threshold:
                continue
            full = len(tier) + 1 > most
            if full and carried.score < low:
                continue
            if weakest is not None and (low < threshold or full):
                carried, tier[weakest] = tier[weakest], carried
            else:
                tier.append(carried)
                carried = None
        elif examine and weakest is not None and low < threshold:
            carried = tier[weakest]
            tier[weakest] = tier[-1]
            tier.pop()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 70),
    high=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    low_share=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    catch_up=st.integers(0, 1),
)
def test_diffkv_step_follows_the_model(seed: int, length: int, high: float, low_share: float, catch_up: int) -> None:
    kv = f"diffkv:window=6,sinks=2,alpha_high={high},alpha_low={high * low_share},interval=1,catch_up={catch_up}"
    check_against_model(kv, seed, length)


@pytest.mark.parametrize("seed", range(3))
def test_three_tiers_with_caps_follow_the_model(seed: int) -> None:
    check_against_model(ThreeTiers(), seed, 40)


@pytest.mark.parametrize("seed", range(3))
def test_caps_that_grow_with_the_request_follow_the_model(seed: int) -> None:
    share = torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(seed)) * 0.5
    share[0, 1, 0], share[1, 0, 2], share[1, 1, 1] = 0.0, torch.inf, 2.0
    check_against_model(ThreeTiers(), seed, 16, share)


def grown_caps(state: CacheState, slot: int, at: tuple[int, int], seen: int) -> list[int]:
    pairs = zip(state.cap[slot][at].tolist(), state.cap_share[slot][at], strict=True)
    caps = []
    for (cap, share), layout in zip(pairs, state.layouts, strict=True):
        pages = math.inf if share == torch.inf else math.ceil(math.ceil(float(share * seen)) / layout.tokens)
        caps.append(int(min(cap, pages * layout.tokens)))
    return caps


def check_against_model(kv: str | ThreeTiers, seed: int, length: int, share: torch.Tensor | None = None) -> None:
    cache, [policy] = small_cache([kv])  # type: ignore[list-item]
    generator = torch.Generator().manual_seed(seed)
    slot = cache.admit(replace(policy.rule, share=share))
    random_prompt(cache, policy, slot, length, generator)
    state = cache.state
    for _ in range(12):
        start = int(state.window_start[slot])
        random_step(cache, [slot], generator, step=False)
        heads = [(layer, head) for layer in range(cache.spec.num_layers) for head in range(cache.spec.num_kv_heads)]
        before = {at: tokens_of(cache, slot, *at) for at in heads}
        window_score = state.window_score[slot].clone()
        cache.step(torch.tensor([slot]))
        seen = int(state.seen[slot])
        row = start if start < int(state.sinks[slot]) else state.sink_rows + start % state.ring_rows
        for at, tiers in before.items():
            alpha, cap = state.alpha[slot][at].tolist(), grown_caps(state, slot, at, seen)
            if seen - start > int(state.window[slot]):
                carried = Token(start, float(window_score[at][row]))
                model_cascade(tiers, carried, alpha, cap, seen, examine=False)
            if int(state.catch_up[slot]):
                model_cascade(tiers, None, alpha, cap, seen, examine=True)
            got = tokens_of(cache, slot, *at)
            assert [[t.position for t in tier] for tier in got] == [[t.position for t in tier] for tier in tiers]
        cache.check_integrity()


def brute_force_importance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    tokens, heads, dim = k.shape
    out = torch.zeros(heads, tokens)
    for head in range(heads):
        group = q.shape[1] // heads
        rows = []
        for i in range(tokens):
            per_head = []
            for g in range(group):
                logits = k[: i + 1, head] @ q[i, head * group + g] / dim**0.5
                per_head.append(torch.cat([torch.softmax(logits, 0), torch.zeros(tokens - i - 1)]))
            rows.append(torch.stack(per_head).amax(0))
        attention = torch.stack(rows)
        for i in range(tokens - 1):
            out[head, i] = attention[i + 1 :, i].mean()
    return out


def test_importance_is_the_mean_over_all_later_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(40, 6, 16, generator=generator), torch.randn(40, 2, 16, generator=generator)
    score = prompt_importance(q, k, *sampled_rows(40, sample=1))
    torch.testing.assert_close(score, brute_force_importance(q, k), rtol=1e-4, atol=1e-6)
    assert bool((score[:, -1] == 0).all()), "no query follows the last token"


def test_sampled_importance_is_close_and_exact_for_the_tail() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(900, 2, 16, generator=generator), torch.randn(900, 1, 16, generator=generator)
    exact = prompt_importance(q, k, *sampled_rows(900, sample=1))
    sampled = prompt_importance(q, k, *sampled_rows(900, sample=8))
    torch.testing.assert_close(sampled[:, -256:], exact[:, -256:])
    assert float((sampled / exact.clamp_min(1e-9) - 1)[:, :-256].abs().mean()) < 0.15


def test_rows_depend_on_positions_only() -> None:
    rows, weight = sampled_rows(3000, 8)
    longer, _ = sampled_rows(5000, 8)
    older = rows[rows < 3000 - 256]
    assert torch.equal(older, longer[longer < 3000 - 256])
    assert 0.08 < len(older) / (3000 - 256) < 0.18
    assert set(weight.tolist()) == {1.0, 8.0}
    assert observation_rows(10, 64)[0].tolist() == list(range(10))


@pytest.mark.parametrize("interval", [1, 4])
def test_a_mean_with_a_horizon_is_exact_up_to_it_and_forgets_beyond(interval: int) -> None:
    attention = torch.rand(397, generator=torch.Generator().manual_seed(0))
    attention[:200] += 1.0
    position, step = torch.tensor(0), torch.tensor(interval)

    def mean_at(last: int, horizon: int) -> float:
        mean = torch.tensor(0.0)
        for now in range(interval, last + 1, interval):
            mean = updated_mean(mean, attention[now], position, torch.tensor(now), step, torch.tensor(horizon))
        return float(mean)

    rows = attention[::interval][1:]
    assert mean_at(64, 64) == pytest.approx(float(rows[: 64 // interval].mean()), rel=1e-5)
    assert mean_at(396, 2**31 - 1) == pytest.approx(float(rows.mean()), rel=1e-5)
    old = 1.0 - interval / 32
    assert mean_at(396, 32) == pytest.approx(_forgetting(rows, 32 // interval, old), rel=1e-4)
    assert mean_at(396, 32) < 0.75 < 0.9 < mean_at(396, 2**31 - 1)
    assert mean_at(396, 1) == pytest.approx(float(attention[396]), rel=1e-5)


def _forgetting(rows: torch.Tensor, first: int, old: float) -> float:
    mean = float(rows[:first].mean())
    for row in rows[first:].tolist():
        mean = old * mean + (1 - old) * row
    return mean


def test_decode_scores_are_means_over_later_queries() -> None:
    """With interval=1 a stored score is the mean of what each later query gave, as in the prompt."""
    cache, [policy] = small_cache(["diffkv:window=4,sinks=0,alpha_high=0,alpha_low=0,interval=1"], max_len=256)
    generator = torch.Generator().manual_seed(4)
    slot = cache.admit(policy.rule)
    stored = random_prompt(cache, policy, slot, 20, generator)
    keys, first = [k for k, _ in stored], tokens_of(cache, slot, 0, 0)[0]
    total = {t.position: t.score * (19 - t.position) for t in first}
    for _ in range(50):
        (q, k, _, _), _ = random_step(cache, [slot], generator)
        keys[0] = torch.cat([keys[0], k])
        now = len(keys[0]) - 1
        logits = keys[0][:, 0] @ q[0, :2].T / 4
        attention = torch.softmax(logits, 0).amax(1)
        for position in range(now):
            total[position] = total.get(position, 0.0) + float(attention[position])
    known = {t.position: t.score for t in tokens_of(cache, slot, 0, 0)[0]}
    far = [p for p in known if p < 16]
    for position in far:
        # Eight-bit keys and fp16 scores: within a few per cent of the exact mean.
        assert known[position] == pytest.approx(total[position] / (69 - position), rel=0.05)
