"""Rotary tables as multiples of one turn, and the tables that GPU kernels make of them."""

from __future__ import annotations

import pytest
import torch

from siftkv.cache import build_conditioning
from siftkv.kernels.cuda.bias import NEAR, TURNS, bias_tables
from siftkv.kernels.reference.condition import rotated_bias
from siftkv.kernels.turns import exact_turns, turn_rates


def rates_of(theta: float, pairs: int) -> torch.Tensor:
    return theta ** -(torch.arange(pairs) / pairs)


@pytest.mark.parametrize(("positions", "theta", "size"), [(40, 1e4, 1.0), (3000, 1e6, 1.2), (70000, 1e4, 1.0)])
def test_rates_are_found_in_a_table_of_rounded_angles(positions: int, theta: float, size: float) -> None:
    angle = torch.arange(positions)[:, None] * rates_of(theta, 8)
    rates = turn_rates(size * angle.cos(), size * angle.sin())
    assert rates is not None
    assert float((rates / rates_of(theta, 8).double() - 1).abs().max()) < 2e-7
    cos, sin = exact_turns(rates, size, positions)
    assert float((cos - size * angle.cos()).abs().max()) < 1e-6 + 2e-7 * positions
    assert torch.allclose(turn_rates(cos, sin), rates, rtol=0, atol=1e-6 / positions)


def test_turns_that_depend_on_the_position_are_not_steady() -> None:
    position = torch.arange(4096).float()[:, None]
    stretched = rates_of(1e4, 8) / (position.clamp(min=2048) / 2048)
    assert turn_rates((position * stretched).cos(), (position * stretched).sin()) is None


@pytest.mark.parametrize("size", [1.0, 1.2])
def test_tables_of_the_gpu_make_what_was_removed(size: float) -> None:
    """RoPE_p(b) from the turn to an anchor and the distance behind it, for every pair that a head keeps."""
    dim, positions = 64, 1000
    angle = torch.arange(positions)[:, None] * rates_of(1e4, dim // 2)
    bias = torch.zeros(2, dim)
    bias[0, 3:19], bias[1, 1:32:2] = 20.0, -15.0
    c = build_conditioning(1, 2, dim, size * angle.cos(), size * angle.sin(), [bias], [torch.ones(2, dim)])
    tables = bias_tables(c, 32)
    near = tables["near"].float().sum(-2)[0]  # [H, NEAR, blocks, 4, pair, cos and sin]
    turns = torch.view_as_complex(tables["turns"][0])  # [H, rows, blocks, 4, pair]
    position = torch.randint(NEAR, positions, (50,))
    behind = torch.randint(0, NEAR, (50,))
    anchor = position - behind
    for head in range(2):
        found = turns[head, anchor % TURNS] * turns[head, TURNS + anchor // TURNS]
        found = found * torch.view_as_complex(near[head, behind].contiguous())
        pairs = c.pairs[0, head].long()
        constant = torch.complex(tables["bias"][0, head][pairs], tables["bias"][0, head][pairs + dim // 2])
        turned = found.transpose(-1, -2).flatten(1) * constant
        expected = rotated_bias(c, c.bias[0, head], position)
        assert torch.allclose(turned.real, expected[:, pairs], atol=2e-5)
        assert torch.allclose(turned.imag, expected[:, pairs + dim // 2], atol=2e-5)


def test_runs_hold_what_near_rows_and_turns_do() -> None:
    dim, rows = 128, 64
    angle = torch.arange(500)[:, None] * rates_of(1e6, dim // 2)
    bias = torch.zeros(2, dim)
    bias[0, 5:21], bias[1, 40:43] = 20.0, 9.0
    c = build_conditioning(1, 2, dim, angle.cos(), angle.sin(), [bias], [torch.ones(2, dim)])
    tables = bias_tables(c, rows)
    turns = tables["turns"][0, :, 16 : rows + 1 : 16]
    size = turns[0].nbytes
    runs = tables["runs"][0]
    assert torch.equal(runs[:, -size:].contiguous().view(torch.float32), turns.flatten(1))
    operands = runs[:, :-size].contiguous().view(torch.float16).view(2, 2, 2, rows // 2, 4, 2, 2, 2)
    for head, block, part, token, lane, pair in ((0, 0, 0, 5, 1, 1), (0, 1, 1, 62, 3, 0), (1, 0, 1, 33, 2, 1)):
        found = operands[head, block, part, token // 2, lane, pair, token % 2]
        assert torch.equal(found, tables["near"][0, head, token, block, lane, pair, part])
