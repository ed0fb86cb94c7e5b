"""Quest: bounds of pages against their formula, and what attention reads in the engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from siftkv.cache import KVCache
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.errors import PolicyError
from siftkv.policies import Quest, parse_policy
from siftkv.policies.quest import page_bounds
from tests.tiny import prompt, tiny_llm

LENGTH, STEPS = 200, 30


def test_a_bound_is_the_most_that_a_key_of_the_page_can_give() -> None:
    heads, group, pages, a_page, dim = 2, 3, 5, 7, 8
    keys, query = torch.randn(heads, pages, a_page, dim), torch.randn(heads * group, dim)
    least, most = keys.amin(2), keys.amax(2)
    bounds = page_bounds(query, least, most)
    for head in range(heads):
        for page in range(pages):
            of_group = []
            for q in query[head * group : (head + 1) * group]:
                sides = zip(q.tolist(), least[head, page].tolist(), most[head, page].tolist(), strict=True)
                of_group.append(sum(max(x * low, x * high) for x, low, high in sides))
                assert float((keys[head, page] @ q).max()) <= of_group[-1] + 1e-5
            assert float(bounds[head, page]) == pytest.approx(max(of_group), abs=1e-5)


def test_the_best_pages_are_chosen() -> None:
    least, most = torch.zeros(1, 4, 2), torch.tensor([[[1.0, 0], [3, 0], [0, 2], [9, -0.0]]])
    assert Quest().chosen(torch.tensor([[1.0, 1.0]])[0][None], least, most, 2).tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("form", ["dense", "k8v8"])
def test_pages_beyond_the_budget_are_skipped_and_kept(kernels: str, form: str) -> None:
    kv = f"quest:budget=64,dense_layers=1,window=4,sinks=2,format={form}"
    llm = tiny_llm(kv, kv_cache_memory_bytes=6 << 20, kernels=kernels)
    policy = parse_policy(kv)
    assert isinstance(policy, Quest)
    a_page, state = llm.cache.spec.layouts[0].tokens, llm.cache.state
    run = ForcedRun(llm.engine, [ForcedRow(prompt(LENGTH), prompt(STEPS, 1), policy)])
    for step, _ in enumerate(run):
        slot = int(state.seen.argmax())
        full = (LENGTH + step - 6) // a_page  # when the choice was made
        skipped = state.page_skip[slot].sum((-1, -2))
        assert skipped[0].tolist() == [0, 0], "the first layer reads everything"
        assert skipped[1].tolist() == [full - policy.pages(LENGTH + step, a_page)] * 2
        assert state.lengths[slot, :, :, 0].unique().tolist() == [LENGTH + step + 1 - 6]
        llm.cache.check_integrity()
    assert policy.pages(LENGTH, a_page) == -(-58 // a_page)


def test_the_query_of_the_step_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = "quest:budget=64,dense_layers=0,window=4,sinks=2"
    llm = tiny_llm(kv, kv_cache_memory_bytes=6 << 20)
    policy, cache, asked = parse_policy(kv), llm.cache, []
    assert isinstance(policy, Quest)
    a_page, attend = cache.spec.layouts[0].tokens, type(cache).attend

    def watched(self: KVCache, layer: int, slots: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen, slot = int(cache.state.seen[slots[0]]), int(slots[0])
        keys, full = cache.tokens(layer, slot).k, (seen - 6) // a_page
        paged = keys[:, 2 : 2 + full * a_page].unflatten(1, (full, a_page))  # after the sinks
        bounds = page_bounds(q[0], paged.amin(2), paged.amax(2))
        best = bounds.topk(policy.pages(seen, a_page)).indices
        expected = torch.zeros_like(bounds, dtype=torch.bool).scatter_(1, best, True)
        asked.append(torch.equal(cache.state.page_skip[slot, layer, :, 0, :full] == 0, expected))
        return attend(self, layer, slots, q, k, v)

    monkeypatch.setattr(type(cache), "attend", watched)
    for _ in ForcedRun(llm.engine, [ForcedRow(prompt(LENGTH), prompt(STEPS, 1), policy)]):
        pass
    assert asked == [True] * (2 * STEPS)


@pytest.mark.parametrize("kv", ["quest:ratio=1,window=8", "quest:budget=1000", "quest:ratio=0.1,dense_layers=2"])
def test_what_skips_nothing_is_full(kv: str) -> None:
    found = []
    for each in (kv, "full"):
        llm = tiny_llm(each, kv_cache_memory_bytes=6 << 20)
        found.append(torch.stack([x.clone() for x in ForcedRun(llm.engine, [_row(each)])]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def _row(kv: str) -> ForcedRow:
    return ForcedRow(prompt(LENGTH), prompt(STEPS, 1), parse_policy(kv))


def test_skipping_changes_something() -> None:
    found = []
    for kv in ("quest:budget=32,dense_layers=0", "full"):
        llm = tiny_llm(kv, kv_cache_memory_bytes=6 << 20)
        found.append(torch.stack([x.clone() for x in ForcedRun(llm.engine, [_row(kv)])]))
    assert not torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_requests_side_by_side_choose_for_themselves() -> None:
    kv = "quest:budget=48,dense_layers=0"
    llm = tiny_llm(kv, kv_cache_memory_bytes=8 << 20)
    rows = [ForcedRow(prompt(length, length), prompt(12, length), parse_policy(kv)) for length in (60, 150)]
    together = torch.stack([x.clone() for x in ForcedRun(llm.engine, rows)], 1)
    for row, logits in zip(rows, together, strict=True):
        alone = torch.stack([x.clone() for x in ForcedRun(llm.engine, [row])], 1)[0]
        torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-4)


def test_bad_settings() -> None:
    for kv, match in (("quest:ratio=0", "above 0"), ("quest:dense_layers=-1", "dense_layers")):
        with pytest.raises(PolicyError, match=match):
            parse_policy(kv)
