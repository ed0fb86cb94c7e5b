"""Prompts ranked by worth on a GPU: worth, shares and tiers as the policy finds them prompt by prompt on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from siftkv.attention import PrefillAttention, PromptChunk
from siftkv.cache import KVCache
from siftkv.engine.binding import BoundPolicy
from siftkv.kernels.cuda import measure_prompts, rank_prompts
from siftkv.kernels.cuda.worth import _kernels
from siftkv.kernels.prompts import PromptBatch
from siftkv.kernels.ranking import LEVELS, at_or_above
from siftkv.policies import Sift, parse_policy
from siftkv.policies.base import Prices, PromptView, RankedPrompts
from siftkv.policies.sift import _LATER_FIRST, _rooms, _sizes
from siftkv.policies.sift_shares import Room, by_rank, shares
from tests.gpu.test_gpu_engine import GREEDY, open_llm, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (300, 1, 1900, 40, 1024, 700, 5, 2600)
LAYERS = 3
KV = ("sift", "sift:ratio=0.2", "diffkv:window=16,high=k8v4c,low=k4v2c")
PRICES = Prices(token=(110.0, 80.0, 60.0), page=2640.0, slot=200.0, full=256.0, costs=(1e-3, 1e-4, 3e-3))


@dataclass
class Layer:
    """One layer of a batch of prompts under a policy."""

    policy: Sift
    batch: PromptBatch
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor

    @classmethod
    def random(
        cls, policy: Sift, lengths: tuple[int, ...], heads: int, group: int, dim: int, dtype: torch.dtype
    ) -> Layer:
        torch.manual_seed(dim + heads)
        middles = [(min(policy.sinks, n), max(min(policy.sinks, n), n - policy.window)) for n in lengths]
        batch = PromptBatch.of(
            [*range(len(lengths))], lengths, middles, [policy.rows(n) for n in lengths], torch.device("cuda", 0)
        )
        qkv = torch.randn(batch.tokens, heads * (group + 2), dim, device="cuda") * 1.5
        q, k, v = qkv.to(dtype).split((heads * group, heads, heads), 1)
        lse = torch.empty(heads * group, batch.tokens, device="cuda")
        for b, n in enumerate(lengths):
            span, hidden = batch.span(b), torch.ones(n, n, dtype=torch.bool, device="cuda").triu(1)
            for head in range(heads * group):  # one by one: other tests share the GPU's memory
                logits = q[span, head].float() @ k[span, head // group].float().T / dim**0.5
                lse[head, span] = logits.masked_fill_(hidden, -math.inf).logsumexp(-1)
        return cls(policy, batch, q, k, v, lse)

    def score(self) -> Tensor:
        return measure_prompts(self.batch, self.q, self.k, self.lse)

    def rank(self, score: Tensor, width: int, prompts: range | None = None) -> object:
        which = range(len(self.batch.slots)) if prompts is None else prompts
        own = self.q, self.k, self.v, self.lse, score
        return rank_prompts(self.batch, which, self.policy.worth_rule, width, *own)

    def view(self, prompt: int, layer: int, score: Tensor) -> PromptView:
        """As the reference sees one prompt, on the CPU."""
        span, (first, end) = self.batch.span(prompt), self.batch.middles[prompt]
        position = torch.arange(self.batch.lengths[prompt])
        own = (x[span].cpu().float()[None] for x in (self.q, self.k, self.v))
        return PromptView(
            layer, score[:, span].cpu()[None], (position < first) | (position >= end), *own, layers=LAYERS
        )


def page_of(tier: int) -> int:
    return round(PRICES.page / PRICES.token[tier])


@pytest.mark.parametrize(
    ("heads", "group", "dim", "dtype", "settings"),
    [
        (2, 6, 128, torch.bfloat16, {}),
        (8, 4, 128, torch.bfloat16, {"ratio": 0.175}),
        (3, 3, 64, torch.float16, {"observe": 100, "reach": 50, "pool": 1, "young": 0}),
        (1, 1, 256, torch.bfloat16, {"pool": 9, "distant": 2.0, "contrast": 3.0}),
        (4, 2, 80, torch.float16, {"observe": 700, "window": 64, "sinks": 0, "ratio": 0.4}),
        (2, 2, 64, torch.bfloat16, {"pool": 1023}),
    ],
)
def test_prompts_of_any_lengths_are_sifted_as_by_the_reference(
    heads: int, group: int, dim: int, dtype: torch.dtype, settings: dict[str, float]
) -> None:
    policy = Sift(**settings)  # type: ignore[arg-type]
    layer = Layer.random(policy, LENGTHS, heads, group, dim, dtype)
    for index in (0, 2):
        measured, score, ranked = layer.score(), layer.score(), []

        def rank(width: int, score: Tensor = score, ranked: list = ranked) -> object:
            ranked.append(layer.rank(score, width))
            return ranked[-1]

        found = policy.sift_ranked(RankedPrompts(index, LAYERS, LENGTHS, heads, rank), PRICES)  # type: ignore[arg-type]
        worth = ranked[0].plan.space["worth"]
        assert found.score is not None
        assert found.share is not None
        for b, n in enumerate(LENGTHS):
            span, seen = layer.batch.span(b), layer.view(b, index, measured)
            expected = policy.sift(seen, PRICES)
            torch.testing.assert_close(worth[:, span].cpu(), policy.worth(seen)[0][0], rtol=2e-3, atol=1e-12)
            torch.testing.assert_close(found.score[:, span].cpu(), expected.score[0], rtol=2e-3, atol=1e-9)  # type: ignore[index]
            tier = found.tier[:, span].cpu()
            assert (tier[:, seen.protected] == -1).all()
            for t in range(3):
                counts = [(x == t).sum(-1) for x in (tier, expected.tier[0])]
                assert (counts[0] - counts[1]).abs().max() <= page_of(t), f"prompt of {n}, tier {t}"
            assert (tier == expected.tier[0]).float().mean() > 0.985, f"prompt of {n}"
            torch.testing.assert_close(found.share[b].cpu(), expected.share[0], rtol=0.02, atol=1.5 * 44 / n)  # type: ignore[index]


@pytest.mark.parametrize("constant", [False, True])
def test_ranks_are_exact_and_equals_stand_in_their_order(constant: bool) -> None:
    policy, heads = Sift(young=0), 3
    layer = Layer.random(policy, LENGTHS, heads, 2, 64, torch.bfloat16)
    if constant:
        layer.v[::2] = 0.0  # every other token is worth nothing
    width = LEVELS + 160
    ranking = layer.rank(layer.score(), width)
    share = torch.rand(len(LENGTHS), heads, 3, generator=torch.Generator().manual_seed(0)).sort(-1).values
    share[0] = 0.0
    share[2] = 1.0
    sizes = torch.tensor([end - first for first, end in layer.batch.middles])
    bounds = share * sizes[:, None, None]
    tier, _ = ranking.place(bounds.cuda())  # type: ignore[attr-defined]
    space = {name: x.cpu() for name, x in ranking.plan.space.items()}  # type: ignore[attr-defined]
    above = space["above"]
    for b, n in enumerate(LENGTHS):
        seen, norm = layer.view(b, 0, space["worth"]), space["norm"][:, layer.batch.span(b)]
        apart = (seen.score + space["prior"][b][:, None] * norm) * (1 + _LATER_FIRST * seen.position / n)
        apart = apart.masked_fill(seen.protected, -1.0)
        assert torch.equal(tier[:, layer.batch.span(b)].cpu(), by_rank(apart, bounds[b : b + 1])[0]), f"prompt of {n}"
        difference = (above[b] - at_or_above(apart, width)[0]).abs()
        assert difference.max() <= 2, "logarithms that are rounded otherwise put few tokens elsewhere"
        assert difference.mean() < 0.05


def test_shares_are_those_of_the_reference() -> None:
    policy, heads, lengths = Sift(), 8, (*LENGTHS, 8192)
    layer = Layer.random(policy, lengths, heads, 1, 64, torch.bfloat16)
    sizes = _sizes(policy, PRICES)
    ranking = layer.rank(layer.score(), LEVELS + sizes.shift[0])
    above = ranking.above  # type: ignore[attr-defined]
    for index in range(LAYERS):
        room = _rooms(policy, LAYERS, lengths, heads, PRICES, above.device)[index]
        held, share = (x.cpu() for x in ranking.share_out(sizes, room))  # type: ignore[attr-defined]
        expected = shares(above.cpu(), sizes, Room(*room.cpu()))
        same = (held - expected[0]).abs() <= 1
        assert same.float().mean() > 0.97
        torch.testing.assert_close(share[same], expected[1][same], rtol=0.01, atol=2e-3)


def test_no_pool_is_compiled_for_itself() -> None:
    for pool in (5, 7, 9):
        layer = Layer.random(Sift(pool=pool), LENGTHS[:4], 5, 1, 64, torch.bfloat16)
        before = _kernels.cache_info().misses
        layer.rank(layer.score(), LEVELS)
        assert _kernels.cache_info().misses - before == (pool == 5)


def test_a_prompt_is_ranked_as_it_is_alone() -> None:
    policy = Sift()
    layer = Layer.random(policy, LENGTHS, 2, 4, 128, torch.bfloat16)
    together = layer.rank(layer.score(), LEVELS)
    worth, above = together.plan.space["worth"].clone(), together.above.clone()  # type: ignore[attr-defined]
    for b in range(len(LENGTHS)):
        alone = layer.rank(layer.score(), LEVELS, range(b, b + 1))
        span = layer.batch.span(b)
        assert torch.equal(alone.plan.space["worth"][:, span], worth[:, span])  # type: ignore[attr-defined]
        assert torch.equal(alone.above[0], above[b])  # type: ignore[attr-defined]


def test_rows_whose_sums_are_not_known_are_summed() -> None:
    layer = Layer.random(Sift(), LENGTHS, 2, 3, 128, torch.bfloat16)
    known = layer.rank(layer.score(), LEVELS).plan.space["worth"].clone()  # type: ignore[attr-defined]
    own = layer.q, layer.k, layer.v, None, layer.score()
    found = rank_prompts(layer.batch, range(len(LENGTHS)), layer.policy.worth_rule, LEVELS, *own)
    torch.testing.assert_close(found.plan.space["worth"], known, rtol=1e-3, atol=1e-12)


def test_the_host_waits_for_nothing(request: pytest.FixtureRequest) -> None:
    llm = open_llm(kv="sift", formats=[], max_num_seqs=16, max_model_len=2048)
    cache: KVCache = llm.cache
    policies = [BoundPolicy(parse_policy(kv), cache.spec) for kv in KV]
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    batches = (500, 300, 300, 900, 20, 64), (450, 310, 333, 1000, 20, 7), (50, 700, 700, 70, 700, 1)
    for turn, lengths in enumerate(batches):
        own = [policies[i] for i in (0, 0, 0, 1, 1, 2)]
        slots = [cache.admit(p.rule) for p in own]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        qkv = torch.randn(sum(lengths), 12, 64, device="cuda", dtype=torch.bfloat16)
        chunks = [PromptChunk(*x) for x in zip(slots, starts, lengths, own, strict=True)]
        if turn:  # the first batch compiles
            torch.cuda.set_sync_debug_mode("error")
        attention = PrefillAttention(cache, chunks)
        for layer in range(cache.spec.num_layers):
            attention(layer, qkv[:, :8], qkv[:, 8:10], qkv[:, 10:])
        torch.cuda.set_sync_debug_mode("default")
        assert cache.finish_prompts(slots, list(lengths)) == [None] * len(lengths)
        cache.check_integrity()
        cache.release(slots)


@pytest.mark.parametrize("ratio", [0.2, 0.3])
def test_an_engine_keeps_to_the_ratio(ratio: float) -> None:
    llm = open_llm(kv=f"sift:ratio={ratio}", formats=[], check_integrity=True)
    found = llm.generate(prompts(), GREEDY)
    long = [out.kv.ratio for out, ids in zip(found, prompts(), strict=True) if out.kv is not None and len(ids) >= 300]
    assert len(long) == 2
    assert all(0.6 * ratio < r < 1.4 * ratio for r in long), long  # pages are few and large here
    assert llm.cache.free_pages == llm.cache.spec.num_pages
