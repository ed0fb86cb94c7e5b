"""The GPU's importance of prompt tokens against the reference."""

from __future__ import annotations

import pytest
import torch

from siftkv.errors import FormatError
from siftkv.kernels import reference
from siftkv.kernels.cuda.prompt import prompt_importance
from siftkv.policies.importance import observation_rows, sampled_rows

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
