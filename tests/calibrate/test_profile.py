"""Profiles: what they say, how they load, and whom they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from siftkv import SamplingParams
from siftkv.engine.conditioning import condition
from siftkv.errors import PolicyError
from siftkv.models.fingerprint import model_fingerprint
from siftkv.policies import ProfilePolicy, parse_policy
from siftkv.policies.profile_file import Data, Figures, Keys, Profile, ProfiledModel, Target, read_profile
from tests.tiny import prompt, tiny_llm, tiny_model

KV = "diffkv:alpha_high=0.9,alpha_low=0.1,window=8,sinks=2"
FIGURES = Figures(positions=8, mean_kl=0.01, worst_decile_kl=0.02, agreement=0.9, ratio=0.3, per_entry=40.0)


def profile(seed: int = 0, **changes: object) -> Profile:
    model = tiny_model(seed)
    config = model.config
    settings: dict[str, object] = {
        "model": ProfiledModel(
            name="tiny",
            fingerprint=model_fingerprint(model.decoder),
            architecture=config.architecture,
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype="float32",
            device="cpu",
        ),
        "conditioning": "full",
        "policy": KV,
        "target": Target(max_kl=0.02),
        "reached": FIGURES,
        "keys": Keys(error=[[0.0]], relative=[[0.0]], shift=[[0.0]]),
        "data": Data(texts=["words"], sha256="0" * 16, prompt=8, forced=4, windows=1, offset=0),
        "path": [],
        "versions": {"siftkv": "0"},
        "date": "2026-11-29",
    }
    return Profile(**(settings | changes))  # type: ignore[arg-type]


def written(path: Path, **changes: object) -> str:
    profile(**changes).write(path)  # type: ignore[arg-type]
    return f"profile:{path}"


class TestFingerprint:
    def test_tells_models_apart(self) -> None:
        assert model_fingerprint(tiny_model(0).decoder) == model_fingerprint(tiny_model(0).decoder)
        assert model_fingerprint(tiny_model(0).decoder) != model_fingerprint(tiny_model(1).decoder)
        assert model_fingerprint(tiny_model(0).decoder) != model_fingerprint(tiny_model(0, num_layers=3).decoder)

    def test_is_the_same_in_any_dtype_and_after_conditioning(self) -> None:
        model = tiny_model(0, torch.bfloat16, qkv_bias=True)
        plain = model_fingerprint(model.decoder)
        assert model_fingerprint(tiny_model(0, torch.bfloat16, qkv_bias=True).decoder.float()) == plain
        assert model_fingerprint(tiny_model(0, torch.bfloat16, qkv_bias=True).decoder.half()) == plain
        before = model.decoder.layers[0].o.clone()
        condition(model, "full")
        assert not torch.equal(before, model.decoder.layers[0].o)
        assert model_fingerprint(model.decoder) == plain


class TestLoading:
    def test_runs_as_the_policy_that_it_names(self, tmp_path: Path) -> None:
        kv = written(tmp_path / "a, b=c.json")
        greedy = SamplingParams(temperature=0, max_tokens=20)
        asked = tiny_llm(KV).generate([prompt(60)], greedy)[0]
        found = tiny_llm(kv).generate([prompt(60)], greedy)[0]
        assert found.outputs[0].token_ids == asked.outputs[0].token_ids
        assert found.kv.policy == asked.kv.policy == parse_policy(KV).describe()
        assert found.kv.tokens_by_tier == asked.kv.tokens_by_tier

    def test_is_refused_for_another_model(self, tmp_path: Path) -> None:
        kv = written(tmp_path / "p.json", seed=1)
        with pytest.raises(PolicyError, match=r"was made for another model .tiny, 2 layers of 2 kv heads.*calibrate"):
            tiny_llm(kv)
        with pytest.raises(PolicyError, match="was made for another model"):
            tiny_llm(KV).generate([prompt(20)], kv=kv)

    def test_a_changed_file_is_another_policy(self, tmp_path: Path) -> None:
        kv = written(tmp_path / "p.json")
        first = parse_policy(kv)
        assert parse_policy(kv) == first
        assert parse_policy(first.describe()) == first
        written(tmp_path / "p.json", policy="uniform:k4v4")
        second = parse_policy(kv)
        assert second != first
        assert hash(second) != hash(first)
        assert isinstance(second, ProfilePolicy)
        assert second.policy == parse_policy("uniform:k4v4")

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"siftkv_profile": 2}, "siftkv_profile"),
            ({"policy": 3}, "policy"),
            ({"extra": 1}, "extra"),
            ({"reached": None}, "reached"),
        ],
        ids=str,
    )
    def test_a_file_of_another_kind_is_refused(self, change: dict[str, object], says: str, tmp_path: Path) -> None:
        path = tmp_path / "p.json"
        path.write_text(json.dumps(json.loads(profile().model_dump_json()) | change))
        with pytest.raises(PolicyError, match=f"no profile of version 1 .{says}"):
            parse_policy(f"profile:{path}")

    def test_mistakes_say_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(PolicyError, match="profile needs a file"):
            parse_policy("profile")
        with pytest.raises(PolicyError, match=r"cannot read the profile .*missing\.json"):
            parse_policy(f"profile:{tmp_path / 'missing.json'}")
        (tmp_path / "p.json").write_text("secret words")
        with pytest.raises(PolicyError, match="is no profile") as caught:
            parse_policy(f"profile:{tmp_path / 'p.json'}")
        assert "secret" not in str(caught.value)
        with pytest.raises(PolicyError, match="cannot name another profile"):
            parse_policy(written(tmp_path / "q.json", policy=f"profile:{tmp_path / 'q.json'}"))
        with pytest.raises(PolicyError, match="unknown kv policy 'nonsense'"):
            parse_policy(written(tmp_path / "q.json", policy="nonsense"))

    def test_round_trip(self, tmp_path: Path) -> None:
        made = profile(precise_keys=[(0, 1)], held_out=FIGURES)
        made.write(tmp_path / "p.json")
        assert read_profile(tmp_path / "p.json") == made
