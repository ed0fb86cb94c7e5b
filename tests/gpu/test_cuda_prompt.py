"""The GPU's prompt kernels: importance against the reference, batches of prompts against one after another."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from siftkv.attention import prefill
from siftkv.cache.conditioning import hadamard
from siftkv.cache.integrity import check_integrity
from siftkv.errors import FormatError
from siftkv.kernels import reference
from siftkv.kernels.cuda import (
    append_tokens,
    measure_prompts,
    prompt_importance,
    refused_layers,
    store_prompts,
    write_window,
)
from siftkv.kernels.prompts import PromptBatch, store_one_by_one
from siftkv.kernels.state import CacheState
from siftkv.policies.importance import observation_rows, sampled_rows
from tests.gpu.test_cuda_sift import moved
from tests.kernel_helpers import assert_same, make_state, random_tiers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def compare(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    rows, weight = rows.cuda(), weight.cuda()
    expected = reference.prompt_importance(q, k, rows, weight)
    found = prompt_importance(q, k, rows, weight)
    torch.testing.assert_close(found, expected, rtol=5e-4, atol=1e-9)
    assert torch.equal(found, prompt_importance(q, k, rows, weight)), "sums depend on the run"


@pytest.mark.parametrize(
    ("tokens", "heads", "group", "dim", "dtype"),
    [
        (1, 3, 3, 64, torch.bfloat16),
        (50, 3, 1, 16, torch.float16),
        (333, 2, 3, 64, torch.bfloat16),
        (700, 1, 7, 80, torch.float16),
        (1500, 2, 4, 128, torch.bfloat16),
        (1100, 2, 8, 256, torch.bfloat16),
        (300, 2, 2, 40, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("every", [1, 7])
def test_importance_agrees(tokens: int, heads: int, group: int, dim: int, dtype: torch.dtype, every: int) -> None:
    torch.manual_seed(tokens)
    q, k = (torch.randn(tokens, n, dim, device="cuda", dtype=dtype) * 1.5 for n in (heads * group, heads))
    rows = torch.arange(tokens - 1, -1, -every).flip(0)
    compare(q, k, rows, torch.rand(len(rows)) * 5 + 0.1)


@pytest.mark.parametrize("tokens", [255, 1025, 4097])
def test_sampled_rows_and_observation_windows(tokens: int) -> None:
    torch.manual_seed(tokens)
    q, k = (torch.randn(tokens, n, 128, device="cuda", dtype=torch.bfloat16) for n in (8, 2))
    compare(q, k, *sampled_rows(tokens))
    compare(q, k, *observation_rows(tokens, 64))


def test_views_of_a_fused_projection_and_a_sharp_softmax() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(900, 12, 128, device="cuda", dtype=torch.bfloat16) * 6
    compare(qkv[:, :8], qkv[:, 8:10], *sampled_rows(900))


@pytest.mark.parametrize("group", [1, 4])
def test_sums_that_attention_left_save_a_pass(group: int) -> None:
    torch.manual_seed(group)
    q, k = (torch.randn(1500, n, 128, device="cuda", dtype=torch.bfloat16) for n in (2 * group, 2))
    logits = torch.einsum("nhd,mhd->hnm", q.float(), k.repeat_interleave(group, 1).float()) / 128**0.5
    hidden = torch.ones(1500, 1500, dtype=torch.bool, device="cuda").triu(1)
    lse = logits.masked_fill(hidden, -torch.inf).logsumexp(-1)
    rows, weight = (x.cuda() for x in sampled_rows(1500))
    expected = reference.prompt_importance(q, k, rows, weight)
    torch.testing.assert_close(prompt_importance(q, k, rows, weight, lse), expected, rtol=5e-4, atol=1e-9)


def test_no_rows_and_other_types() -> None:
    q, k = (torch.randn(9, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2))
    none = torch.zeros(0, dtype=torch.int64, device="cuda")
    assert not prompt_importance(q, k, none, none.float()).any()
    with pytest.raises(FormatError, match="float32"):
        prompt_importance(q.float(), k.float(), none, none.float())


LENGTHS = (300, 1, 3000, 17, 1024, 64, 1500)


@pytest.mark.parametrize(
    ("prompts", "length", "heads"),
    [(1, 777, (12, 2)), (1, 1301, (12, 2)), (3, 129, (32, 8)), (1, 3001, (32, 8)), (2, 130, (4, 4))],
)
def test_padding_for_the_library_changes_no_bit(prompts: int, length: int, heads: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(length)
    qkv = torch.randn(prompts, length, sum(heads) + heads[1], 128, generator=generator, device="cuda").bfloat16()
    q, k, v = qkv.split((*heads, heads[1]), 2)
    if not prefill._cudnn_gives_lse(q):
        pytest.skip("cuDNN does not serve this GPU")
    assert prefill.planned_length(length, prompts) > length
    found = prefill._cudnn_attention(q, k, v)
    out, lse = prefill._planned(*(x.transpose(1, 2) for x in (q, k, v)))
    assert torch.equal(found[0], out.transpose(1, 2))
    assert torch.equal(found[1], lse.view(prompts, heads[0], length))
    assert found[0][0].flatten(1).data_ptr() == found[0].data_ptr(), "its layout saves a copy"


def batch_of(lengths: tuple[int, ...], measured: bool = True, window: int = 32, sinks: int = 4) -> PromptBatch:
    """Prompts whose slots do not follow each other; some have no measured rows, some an observation window."""
    ways = (sampled_rows, lambda n: None, sampled_rows, lambda n: observation_rows(n, 64))
    middles = [(min(sinks, n), max(min(sinks, n), n - window)) for n in lengths]
    rows = [ways[i % 4](n) if measured else None for i, n in enumerate(lengths)]
    return PromptBatch.of([*range(len(lengths))][::-1], lengths, middles, rows, torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("heads", "group", "dim", "dtype"),
    [(2, 4, 128, torch.bfloat16), (3, 7, 64, torch.float16), (1, 1, 256, torch.bfloat16)],
)
@pytest.mark.parametrize("order", [1, -1])
def test_a_batch_is_measured_as_its_prompts_alone(
    heads: int, group: int, dim: int, dtype: torch.dtype, order: int
) -> None:
    torch.manual_seed(dim)
    batch = batch_of(LENGTHS[::order])
    qkv = torch.randn(batch.tokens, heads * group + 2 * heads, dim, device="cuda", dtype=dtype)
    q, k = qkv[:, : heads * group], qkv[:, heads * group : heads * group + heads]
    lse = torch.rand(heads * group, batch.tokens, device="cuda") + 5
    for given in (None, lse, None):
        found = measure_prompts(batch, q, k, given)
        for i, length in enumerate(batch.lengths):
            span, (rows, weight) = batch.span(i), batch.measured(i)
            own = None if given is None else given[:, span]
            alone = prompt_importance(q[span], k[span], rows, weight, own)
            assert torch.equal(found[:, span], alone), f"prompt {i} of {length} tokens"
            assert bool(alone.any()) == (len(rows) > 0 and length > 1)


def test_many_short_prompts_are_measured() -> None:
    torch.manual_seed(0)
    batch = batch_of(tuple(1 + i * 7 % 90 for i in range(100)))
    q, k = (torch.randn(batch.tokens, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, 2))
    found = measure_prompts(batch, q, k)
    for i in range(100):
        span, (rows, weight) = batch.span(i), batch.measured(i)
        expected = reference.prompt_importance(q[span], k[span], rows, weight)
        torch.testing.assert_close(found[:, span], expected, rtol=5e-4, atol=1e-9)


@dataclasses.dataclass
class Layer:
    """One layer's tokens of a batch, on the CPU."""

    k: Tensor
    v: Tensor
    score: Tensor
    tier: Tensor

    @classmethod
    def random(cls, state: CacheState, tokens: int, shares: tuple[float, ...], seed: int) -> Layer:
        g, (_, _, heads, _, dim) = torch.Generator().manual_seed(seed), state.window_k.shape
        kv = torch.randn(tokens, 2 * heads + 1, dim, generator=g).to(state.window_k.dtype)
        score = torch.rand(heads, tokens, generator=g) ** 6 * 1.1
        return cls(kv[:, :heads], kv[:, heads + 1 :], score, random_tiers(heads, tokens, shares, g))

    def cuda(self) -> tuple[Tensor, ...]:
        return tuple(x.cuda() for x in vars(self).values())


def assert_equal(a: CacheState, b: CacheState) -> None:
    assert_same(a, b)
    assert torch.equal(a.window_score, b.window_score)
    assert torch.equal(a.not_finite, b.not_finite)


def settled(state: CacheState, batch: PromptBatch) -> CacheState:
    """On the CPU, with what is known of each prompt when it has gone through all layers; its pages are whole."""
    state = moved(state, "cpu")
    for slot, length, (first, end) in zip(batch.slots, batch.lengths, batch.middles, strict=True):
        state.seen[slot], state.window_start[slot] = length, max(4, end if end > first else 0)
    check_integrity(state)
    return state


@pytest.mark.parametrize(
    ("tiers", "shares", "dim"),
    [
        (("bf16",), (0.9,), 128),
        (("k8v4", "k4v2"), (0.3, 0.4), 64),
        (("bf16", "k8v4c", "k4v2c"), (0.02, 0.4, 0.3), 128),
        (("k8v4c", "k4v2_g24", "k1v1", "k2v8_g82c"), (0.2, 0.01, 0.3, 0.2), 64),
    ],
)
def test_a_batch_is_stored_as_by_the_reference(tiers: tuple[str, ...], shares: tuple[float, ...], dim: int) -> None:
    slow = make_state(tiers, dim, len(LENGTHS), pages=5000, width=900, rank=2, rotates=False)
    quick, batch = moved(slow, "cuda"), batch_of(LENGTHS, measured=False)
    for layer in (1, 0):
        tokens = Layer.random(slow, batch.tokens, shares, layer)
        store_one_by_one(reference.write_window, reference.append_tokens, slow, layer, batch, *vars(tokens).values())
        store_prompts(quick, layer, batch, *tokens.cuda())
    assert not refused_layers(quick).any()
    slow.not_finite[:] = False
    assert_equal(settled(slow, batch), settled(quick, batch))


def test_rotated_keys_of_a_batch_are_those_of_its_prompts_alone() -> None:
    state = moved(make_state(("k8v4", "k4v2"), 128, len(LENGTHS), pages=5000, width=900, rank=4), "cuda")
    state.conditioning.rotation = hadamard(128).cuda()
    other, batch = moved(state, "cuda"), batch_of(LENGTHS, measured=False)
    for layer in (0, 1):
        tokens = Layer.random(state, batch.tokens, (0.3, 0.4), layer).cuda()
        store_prompts(state, layer, batch, *tokens)
        store_one_by_one(write_window, append_tokens, other, layer, batch, *tokens)
    assert_equal(settled(state, batch), settled(other, batch))


def test_many_short_prompts_take_pages_in_order() -> None:
    lengths = tuple(1 + i * 37 % 230 for i in range(80))
    slow = make_state(("k8v4", "k4v2"), slots=80, pages=3000, width=40, rotates=False)
    quick, batch = moved(slow, "cuda"), batch_of(lengths, measured=False)
    tokens = Layer.random(slow, batch.tokens, (0.3, 0.4), 0)
    store_one_by_one(reference.write_window, reference.append_tokens, slow, 1, batch, *vars(tokens).values())
    store_prompts(quick, 1, batch, *tokens.cuda())
    assert_equal(settled(slow, batch), settled(quick, batch))


def test_a_prompt_without_pages_is_refused_and_the_others_kept() -> None:
    lengths = (200, 1400, 17, 2000, 150)
    slow = make_state(("k8v4", "k4v2"), slots=5, pages=60, width=300, rotates=False)
    quick, batch = moved(slow, "cuda"), batch_of(lengths, measured=False)
    tokens = Layer.random(slow, batch.tokens, (0.3, 0.5), 0)
    refused = (1, 3)
    for i in refused:
        first, end = batch.middles[i]
        tokens.tier[:, batch.starts[i] + first : batch.starts[i] + end] = -1
    store_one_by_one(reference.write_window, reference.append_tokens, slow, 1, batch, *vars(tokens).values())
    for i in refused:
        tokens.tier[:, batch.span(i)] = 1
    store_prompts(quick, 1, batch, *tokens.cuda())
    counts = refused_layers(quick).cpu()
    assert [int(counts[slot]) for slot in batch.slots] == [int(i in refused) for i in range(5)]
    assert_equal(settled(slow, batch), settled(quick, batch))
    for _ in range(8):
        store_prompts(quick, 0, batch, *tokens.cuda())
    assert int(refused_layers(quick)[batch.slots[0]]) > 0
    held = int((quick.page_table >= 0).sum())
    assert held == int(quick.counters[0]) <= 60


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_in_its_prompt(part: str, value: float) -> None:
    state = moved(make_state(("k8v4", "k4v2"), slots=4, width=300, pages=4000, rotates=False), "cuda")
    batch = batch_of((100, 3, 700, 40), measured=False)
    tokens = Layer.random(state, batch.tokens, (0.3, 0.3), 0)
    tokens.tier[:] = -1
    store_prompts(state, 0, batch, *tokens.cuda())
    assert not state.not_finite.any()
    getattr(tokens, part)[batch.starts[2] + 444, 1, 63] = value
    store_prompts(state, 1, batch, *tokens.cuda())
    store_prompts(state, 0, batch, *Layer.random(state, batch.tokens, (0.3, 0.3), 0).cuda())
    assert [bool(state.not_finite[slot]) for slot in batch.slots] == [False, False, True, False]


def test_prompts_that_drop_all_or_fit_the_window_take_no_pages() -> None:
    slow = make_state(("k8v4", "k4v2"), slots=4, pages=1, rotates=False)
    quick, batch = moved(slow, "cuda"), batch_of((1, 36, 700, 5), measured=False)
    tokens = Layer.random(slow, batch.tokens, (0.0, 0.0), 0)
    tokens.tier[:, batch.span(1)] = 1
    store_one_by_one(reference.write_window, reference.append_tokens, slow, 0, batch, *vars(tokens).values())
    store_prompts(quick, 0, batch, *tokens.cuda())
    assert not refused_layers(quick).any()
    assert_equal(settled(slow, batch), settled(quick, batch))


def test_the_host_waits_for_nothing(request: pytest.FixtureRequest) -> None:
    state = moved(make_state(("k8v4", "k4v2"), slots=3, width=300, pages=4000, rotates=False), "cuda")
    q = torch.randn(1400, 6, 64, device="cuda", dtype=torch.bfloat16)
    *tokens, _ = Layer.random(state, 1400, (0.3, 0.3), 0).cuda()
    tier = torch.zeros(3, 1400, dtype=torch.int8, device="cuda")
    request.addfinalizer(lambda: torch.cuda.set_sync_debug_mode("default"))
    for _ in range(2):
        batch = batch_of((700, 500, 200))
        store_prompts(state, 1, batch, *tokens[:2], measure_prompts(batch, q, tokens[0]), tier)
        torch.cuda.set_sync_debug_mode("error")
