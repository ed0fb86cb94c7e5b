"""What an inspection sees against what the cache and the report say, its pictures and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from siftkv import SamplingParams
from siftkv.benchmarks import selection
from siftkv.cli import app
from siftkv.errors import RequestError
from siftkv.evaluate import inspect_plots
from siftkv.evaluate.inspect import Inspection, inspect_request
from siftkv.evaluate.inspect_plots import plot_counts, plot_maps, spread_heads
from tests.tiny import prompt, tiny_llm

HARDKV = "hardkv:p=0.4,window=8,sinks=2,lower=16,upper=32,interval=8,queries=4"


def look(kv: str, tokens: int = 40) -> Inspection:
    llm = tiny_llm(kv, kv_cache_memory_bytes=6 << 20)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = inspect_request(llm, prompt(60), params, 16, lambda: None)
    assert llm.cache.free_pages == llm.cache.spec.num_pages
    return found


def test_every_trigger_is_seen() -> None:
    found = look(HARDKV)
    triggers = [s.trigger for s in found.snapshots if s.trigger is not None]
    assert [t.position for t in triggers] == [60, *range(triggers[1].position, 100, 8)]
    for snapshot in found.snapshots[1:]:
        assert snapshot.trigger is not None
        assert snapshot.seen == snapshot.trigger.position + 1
        # one token came after the trigger, and no head has lost any since
        assert (snapshot.kept - 1 == snapshot.trigger.kept).all()


@pytest.mark.parametrize("kv", ["full:window=8", "diffkv:window=8,sinks=2,alpha_low=0.9", "uniform:k4v4,window=8"])
def test_other_policies_are_looked_at_now_and_then(kv: str) -> None:
    found = look(kv)
    assert [s.seen for s in found.snapshots] == [60, 76, 92]
    assert all(s.trigger is None for s in found.snapshots)
    if kv.startswith("full"):
        assert all((s.kept == s.seen).all() for s in found.snapshots)


def test_a_request_that_ends_at_once_shows_nothing() -> None:
    with pytest.raises(RequestError, match="ended with its first token"):
        look(HARDKV, tokens=1)


def test_json_holds_the_same_numbers() -> None:
    found = look(HARDKV)
    stored = json.loads(json.dumps(found.to_dict()))
    for snapshot, data in zip(found.snapshots, stored["snapshots"], strict=True):
        for layer, heads in enumerate(data["fates"]):
            for head, runs in enumerate(heads):
                fates = [fate for fate, count in runs for _ in range(count)]
                assert fates == snapshot.fates[layer, head].tolist()
                assert sum(fate >= 0 for fate in fates) == data["kept"][layer][head]
    assert stored["report"]["tokens_seen"] == 60 + 39


def test_pictures_are_drawn(tmp_path: Path) -> None:
    for kv in (HARDKV, "full:window=8"):
        found = look(kv)
        plot_maps(found, spread_heads(found, 3), tmp_path / "maps.png")
        plot_counts(found, tmp_path / "counts.png")
        for name in ("maps.png", "counts.png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_an_axis_of_tokens_has_whole_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = []
    monkeypatch.setattr(inspect_plots, "save_figure", lambda figure, *_: figures.append(figure))
    plot_counts(look(HARDKV, tokens=3), tmp_path / "counts.png")
    [figure] = figures
    figure.draw_without_rendering()
    assert all(tick == round(tick) for tick in figure.axes[-1].get_xticks())


def test_the_command_wants_one_prompt() -> None:
    for arguments in (["inspect"], ["inspect", "--prompt", "a", "--data", "b"], ["inspect", "--every", "0"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.model
def test_the_command_writes_everything(tmp_path: Path) -> None:
    kv = "hardkv:p=0.8,lower=32,upper=64,interval=16,window=16"
    asked = f"inspect --kv {kv} --data a_scandal_in_bohemia --prompt-tokens 120 --max-tokens 20"
    run = CliRunner().invoke(app, [*asked.split(), "--out", str(tmp_path / "new" / "folder")])
    assert run.exit_code == 0, run.output
    stored = json.loads((tmp_path / "new" / "folder" / "inspect.json").read_text())
    assert stored["kv"].startswith("hardkv:p=0.8")
    assert {x.name for x in (tmp_path / "new" / "folder").iterdir()} == {"maps.png", "counts.png", "inspect.json"}


def test_counts_of_metrics_are_measured(tmp_path: Path) -> None:
    llm = tiny_llm(selection.policy(), max_model_len=128, kv_cache_memory_bytes=12 << 20)
    found = selection.measure(llm, [prompt(100)], lambda: None)
    for by_share in found.values():
        summaries = [by_share[p].summary() for p in selection.SHARES]
        counts = [s["attention_count"] for s in summaries]
        assert counts == sorted(counts)
        for s in summaries:
            assert abs(s["calibrated_geometric_ratio"] - 1) <= abs(s["geometric_ratio"] - 1) + 0.02
    assert len(selection.to_rows(found)) == 6
    json.dumps(selection.to_data(found, {}), allow_nan=False)
    selection.plot(found, str(tmp_path / "selection.png"), "title")
    assert (tmp_path / "selection.png").stat().st_size > 0
    with pytest.raises(RequestError):
        selection.measure(llm, [[]], lambda: None)
