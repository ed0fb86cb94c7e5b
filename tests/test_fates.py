"""What is read back from pages and windows against what the cache says it holds, and the pictures of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from siftkv import LLM, SamplingParams, parse_policy
from siftkv.engine.fates import DROPPED, token_fates, window_fate
from siftkv.engine.report import kv_report
from siftkv.errors import SiftKVError
from siftkv.evaluate.plots import kept_share, pick_heads, plot_fates, plot_kept
from tests.tiny import prompt, tiny_llm

DIFFKV = "diffkv:alpha_high=1.5,alpha_low=0.9,window=8,sinks=2"


def run(llm: LLM, kv: str, steps: int = 30) -> int:
    """Generate for some steps and return the slot of the running request."""
    llm.engine.add(prompt(100), SamplingParams(max_tokens=200, ignore_eos=True), parse_policy(kv))
    for _ in range(steps):
        llm.engine.step()
    return llm.engine.scheduler.running[0].slot


@pytest.mark.parametrize("kv", [DIFFKV, "full:window=8", "uniform:k4v4,window=8,sinks=2"])
def test_fates_agree_with_the_report(kv: str) -> None:
    llm = tiny_llm(kv)
    slot = run(llm, kv)
    report = kv_report(llm.cache, slot, kv, 0)
    codes = [*range(len(llm.cache.spec.tiers)), window_fate(llm.cache), DROPPED]
    for layer, heads in enumerate(report.per_head_tokens):
        for head, counts in enumerate(heads):
            fate = token_fates(llm.cache, slot, layer, head)
            assert len(fate) == report.tokens_seen
            assert [int((fate == code).sum()) for code in codes] == counts


def test_window_and_sinks_stand_where_they_should() -> None:
    llm = tiny_llm(DIFFKV)
    fate = token_fates(llm.cache, run(llm, DIFFKV), 1, 1)
    near = torch.nonzero(fate == window_fate(llm.cache))[:, 0].tolist()
    assert near == [0, 1, *range(len(fate) - 8, len(fate))]


def test_a_tier_without_positions_beside_dropped_tokens_is_refused() -> None:
    llm = tiny_llm("uniform:k4v4,window=8,sinks=2")
    slot = run(llm, "uniform:k4v4,window=8,sinks=2")
    llm.cache.state.lengths[slot, 0, 0, 0] -= 1
    with pytest.raises(SiftKVError, match="stores no positions"):
        token_fates(llm.cache, slot, 0, 0)


def test_pictures_are_written(tmp_path: Path) -> None:
    llm = tiny_llm(DIFFKV)
    slot = run(llm, DIFFKV)
    report = kv_report(llm.cache, slot, DIFFKV, 0)
    heads = pick_heads(report, 3)
    share = kept_share(report)
    assert share[heads[0]] == share.max()
    assert share[heads[-1]] == share.min()
    fates = {head: token_fates(llm.cache, slot, *head) for head in heads}
    plot_kept({"a": report, "b": report}, tmp_path / "kept.png", "kept")
    plot_fates(fates, [tier.name for tier in llm.cache.spec.tiers], tmp_path / "fates.png", "fates")
    for name in ("kept.png", "fates.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SiftKVError, match="cannot write"):
        plot_kept({"a": report}, tmp_path / "nowhere" / "kept.png", "kept")
