"""Calibration from end to end, the analysis of keys, and the warning where a model is opened without conditioning."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from siftkv import LLM
from siftkv.benchmarks.fidelity import Protocol
from siftkv.benchmarks.texts import Text
from siftkv.cli import app
from siftkv.engine import guard
from siftkv.engine.conditioning import condition
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.engine.guard import bias_strength
from siftkv.errors import NumericsError, SiftKVError
from siftkv.evaluate.calibrate import Goal, calibrate, expected_steps
from siftkv.evaluate.calibrate.fragility import measure_fragility
from siftkv.kernels import reference
from siftkv.models import LoadedModel
from siftkv.policies import Policy, parse_policy
from siftkv.policies.profile import policy_of
from siftkv.policies.profile_file import Profile, read_profile
from tests.models_helpers import FAMILIES, save_random
from tests.tiny import prompt, tiny_llm, tiny_model

DIFFKV = "diffkv:window=8,sinks=2"
PROTOCOL = Protocol(prompt=60, forced=6, windows=1, rows=12)
LONG = Protocol(prompt=480, forced=6, windows=1, rows=12)
"""Long enough for tiers to outweigh the window."""


def text(length: int = 300) -> Text:
    return Text("words", " ".join(f"t{i}" for i in prompt(length)))


def calibrated(kv: str, goal: Goal, protocol: Protocol = PROTOCOL) -> Profile:
    words = text(2 * protocol.length)
    return calibrate(tiny_model(), [words], parse_policy(kv), goal, protocol, "reference")


class TestCalibrate:
    def test_uniform_takes_the_smallest_format_within_a_kl(self) -> None:
        kl = {t.kv: t.figures.mean_kl for t in calibrated("uniform:window=8,sinks=2", Goal(max_kl=9.0)).path}
        k8v8, k8v4, k4v4, k4v2 = kl.values()
        assert k8v8 < k8v4 < k4v4 < k4v2
        found = calibrated("uniform:window=8,sinks=2", Goal(max_kl=(k4v4 + k4v2) / 2))
        assert found.policy == "uniform:format=k4v4,window=8,sinks=2"
        assert found.precise_keys == []
        assert found.reached.mean_kl == pytest.approx(k4v4)
        assert [t.meets for t in found.path] == [True, True, True, False]

    def test_uniform_mixes_by_head_between_two_formats(self) -> None:
        kl = [t.figures.mean_kl for t in calibrated("uniform:window=8,sinks=2", Goal(max_kl=9.0)).path]
        found = calibrated("uniform:window=8,sinks=2", Goal(max_kl=0.3 * kl[1] + 0.7 * kl[2]))
        assert found.policy == "uniform:format=k4v4,window=8,sinks=2"
        assert 0 < len(found.precise_keys) < 4
        assert kl[1] < found.reached.mean_kl < kl[2]
        shift = torch.tensor(found.keys.shift)
        chosen = torch.zeros_like(shift, dtype=torch.bool)
        for at in found.precise_keys:
            chosen[at] = True
        assert float(shift[chosen].min()) >= float(shift[~chosen].max())

    def test_diffkv_in_two_steps(self) -> None:
        wide = calibrated(DIFFKV, Goal(max_kl=99.0), LONG)
        steps = {name: [t for t in wide.path if t.step == name] for name in ("alpha_high", "alpha_low")}
        gentle, harsh = (steps["alpha_low"][i].figures.mean_kl for i in (0, -1))
        found = calibrated(DIFFKV, Goal(max_kl=(gentle + harsh) / 2), LONG)
        policy = parse_policy(found.policy)
        assert all("alpha_low=0.0," in t.kv for t in found.path if t.step == "alpha_high")
        assert found.reached.mean_kl <= (gentle + harsh) / 2
        assert found.reached.ratio < found.path[0].figures.ratio
        assert policy.window == 8
        assert found.held_out is not None
        assert found.held_out.positions == found.reached.positions == PROTOCOL.forced

    def test_a_ratio_is_kept(self) -> None:
        ratios = [t.figures.ratio for t in calibrated(DIFFKV, Goal(max_kl=99.0), LONG).path]
        goal = (min(ratios) + max(ratios)) / 2
        found = calibrated(DIFFKV, Goal(target_ratio=goal), LONG)
        assert found.reached.ratio <= goal
        assert goal < found.path[0].figures.ratio

    def test_any_policy_with_a_ratio(self) -> None:
        found = calibrated("sift:window=8,sinks=2", Goal(target_ratio=0.35), LONG)
        tried = [t.figures.ratio for t in found.path]
        assert found.policy.startswith("sift:ratio=0.")
        assert found.reached.ratio == max(r for r in tried if r <= 0.35)

    def test_what_cannot_be_reached_says_how_far_it_went(self) -> None:
        with pytest.raises(SiftKVError, match=r"no setting of diffkv reaches KL <= 1e-09 on this text: .* has KL "):
            calibrated(DIFFKV, Goal(max_kl=1e-9))
        with pytest.raises(SiftKVError, match="words has 109 tokens and 2 windows of 67 tokens need 133"):
            calibrate(tiny_model(), [text(100)], parse_policy(DIFFKV), Goal(max_kl=1.0), PROTOCOL, "reference")

    def test_the_figures_are_those_of_the_policy_in_the_profile(self) -> None:
        found = calibrated("uniform:window=8,sinks=2", Goal(max_kl=0.02))
        again = calibrated(found.policy, Goal(max_kl=9.0))
        reached = [t.figures for t in again.path if t.kv == found.policy]
        assert policy_of(found).describe() == found.policy
        assert reached[0].mean_kl == pytest.approx(found.reached.mean_kl)

    def test_steps_are_no_more_than_expected(self) -> None:
        taken: list[None] = []
        model, policy = tiny_model(), parse_policy(DIFFKV)
        goal = Goal(max_kl=0.05)
        calibrate(model, [text()], policy, goal, PROTOCOL, "reference", lambda: taken.append(None))
        assert 0 < len(taken) <= expected_steps(model, policy, 1, PROTOCOL) + 3 * PROTOCOL.forced


class TestFragility:
    def test_a_head_with_outlying_keys_stands_out(self) -> None:
        model = tiny_model(num_layers=4)
        conditioning = condition(model, "none")
        plain = measure_fragility(model.decoder, conditioning, prompt(80))
        config = model.config
        row = (config.num_heads + 1) * config.head_dim + 3  # one key channel of layer 2, head 1
        model.decoder.layers[2].qkv[row] *= 40
        outlying = measure_fragility(model.decoder, conditioning, prompt(80))
        assert outlying.ranked()[0] == outlying.fragile()[0] == (2, 1)
        assert float(outlying.error[2, 1]) > 4 * float(plain.error[2, 1])
        assert torch.allclose(outlying.error[:2], plain.error[:2])

    def test_eight_bits_are_sixteen_times_as_exact(self) -> None:
        model = tiny_model()
        conditioning = condition(model, "full")
        four, eight = (measure_fragility(model.decoder, conditioning, prompt(80), bits) for bits in (4, 8))
        ratio = four.error / eight.error
        assert bool((ratio > 14).all())
        assert bool((ratio < 20).all())
        assert bool((four.relative > eight.relative).all())
        assert float(four.shift.mean()) > 100 * float(eight.shift.mean())


def test_shared_prompts_are_kept_as_if_each_had_run_alone() -> None:
    kinds = ["full:window=8,sinks=2", DIFFKV, "uniform:k4v4,window=8,sinks=2", DIFFKV]
    ids = prompt(70)
    llm = tiny_llm(formats=["bf16", "k4v4"])

    def rows(kvs: list[str]) -> list[ForcedRow]:
        return [ForcedRow(ids[:60], ids[60:], parse_policy(kv)) for kv in kvs]

    together = list(ForcedRun(llm.engine, rows(kinds)))
    for i, kv in enumerate(kinds):
        alone = list(ForcedRun(llm.engine, rows([kv])))
        assert all(torch.allclose(a[i], b[0], atol=1e-5) for a, b in zip(together, alone, strict=True))
    assert llm.cache.free_pages == llm.cache.spec.num_pages


def test_a_shared_prompt_that_fails_gives_its_pages_back() -> None:
    model = tiny_model()
    model.decoder.layers[1].qkv[-1] = torch.nan
    llm = tiny_llm(model=model)
    policy = parse_policy(DIFFKV)
    with pytest.raises(NumericsError):
        list(ForcedRun(llm.engine, [ForcedRow(prompt(20), [1], policy)] * 2))
    assert llm.cache.free_pages == llm.cache.spec.num_pages


class TestGuard:
    @pytest.fixture(autouse=True)
    def _nothing_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guard, "_said", set())

    def biased(self) -> LoadedModel:
        model = tiny_model(qkv_bias=True)
        config = model.config
        model.decoder.layers[1].qkv_bias[config.num_heads * config.head_dim] = 1e3
        return model

    def said(self, caplog: pytest.LogCaptureFixture, model: LoadedModel, mode: str, kv: str | Policy) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, guard.__name__):
            tiny_llm(kv, model=model, conditioning=mode, kv_cache_memory_bytes=1 << 24)
        return [record.getMessage() for record in caplog.records]

    def test_says_once_what_and_why(self, caplog: pytest.LogCaptureFixture) -> None:
        model = self.biased()
        [line] = self.said(caplog, model, "none", "uniform:k4v4")
        assert "1 of 2 layers, such as 1" in line
        assert "conditioning='none'" in line
        assert "use conditioning='full', or 8-bit keys" in line
        assert "\n" not in line
        assert self.said(caplog, model, "none", "uniform:k4v4") == []
        [line] = self.said(caplog, model, "bias", "uniform:k4v4")
        assert "removes that alone" in line

    def test_is_silent_where_nothing_is_wrong(self, caplog: pytest.LogCaptureFixture) -> None:
        assert self.said(caplog, self.biased(), "full", "uniform:k4v4") == []
        assert self.said(caplog, self.biased(), "none", "uniform:k8v4") == []
        assert self.said(caplog, self.biased(), "none", "full") == []
        assert self.said(caplog, tiny_model(), "none", "uniform:k4v4") == []
        assert bool((bias_strength(tiny_model()) == 0).all())


def siftkv(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="siftkv")


class TestCommand:
    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        folder = tmp_path_factory.mktemp("models") / "tiny"
        config = copy.deepcopy(FAMILIES["llama"])
        config.max_position_embeddings = 256
        save_random(config, folder)
        return str(folder)

    @pytest.fixture
    def words(self, tmp_path: Path) -> str:
        path = tmp_path / "words.txt"
        drawn = torch.randint(3, 61, (300,), generator=torch.Generator().manual_seed(5)).tolist()
        path.write_text(" ".join(f"w{i}" for i in drawn))
        return str(path)

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ([], "nothing to aim for: give --max-kl"),
            (["--max-kl", "-1"], "--max-kl -1.0: use a number above 0"),
            (["--max-kl", "0.1", "--policy", "full"], "full has no setting"),
            (["--max-kl", "0.1", "--out", "profile.txt"], "a profile is a .json file"),
            (["--max-kl", "0.1", "--data", "missing.txt"], "cannot read missing.txt"),
            (["--max-kl", "0.1", "--out", "/nowhere/p.json"], "cannot write /nowhere/p.json"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_mistakes_are_one_line_before_a_model_is_loaded(self, arguments: list[str], says: str) -> None:
        result = siftkv("calibrate", *arguments)
        assert result.exit_code == 2
        assert says in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1

    def test_help_has_an_example(self) -> None:
        result = siftkv("calibrate", "--help")
        assert result.exit_code == 0
        assert "siftkv calibrate" in result.stdout.partition("Example")[2]

    def test_writes_a_profile_that_loads(
        self, saved: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("siftkv.engine.llm.get_kernels", lambda *_: reference)
        sizes = ("--prompt", "60", "--forced", "4", "--windows", "1", "--data", words)
        out = tmp_path / "own.json"
        arguments = ("--model", saved, "--policy", "uniform:window=8,sinks=2", "--max-kl", "9", "--out", str(out))
        result = siftkv("calibrate", *arguments, *sizes)
        assert result.exit_code == 0, result.stderr
        assert "on other text" in result.stdout
        assert f"--kv profile:{out}" in result.stderr
        assert out.with_suffix(".png").stat().st_size > 1000
        kept = read_profile(out)
        assert kept.policy == "uniform:format=k4v2,window=8,sinks=2"
        assert LLM(saved, f"profile:{out}", kernels="reference").engine.bind(parse_policy(f"profile:{out}")).name == (
            kept.policy
        )
        printed = siftkv("calibrate", *arguments, *sizes, "--json")
        assert printed.exit_code == 0, printed.stderr
        again = Profile.model_validate(json.loads(printed.stdout))
        assert again.reached == kept.reached


@pytest.mark.model
def test_smollm2_reaches_a_kl_on_text_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    sizes = ("--prompt", "256", "--forced", "16", "--windows", "1", "--policy", "uniform", "--max-kl", "0.1")
    result = siftkv("calibrate", *sizes, "--out", str(out))
    assert result.exit_code == 0, result.stderr
    kept = read_profile(out)
    assert kept.policy == "uniform:format=k4v2,window=64,sinks=4"
    assert kept.held_out is not None
    assert kept.held_out.mean_kl < 0.1
    middle = {layer for layer, _ in sorted(kept.fragile)}
    assert middle <= set(range(2, 12))
