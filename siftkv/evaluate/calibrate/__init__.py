"""Calibration: settings for a target, on a user's own model and text, and the profile that keeps them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

from siftkv.benchmarks.fidelity import Protocol, windows_of
from siftkv.benchmarks.results import current_versions
from siftkv.benchmarks.texts import Text
from siftkv.engine.conditioning import condition
from siftkv.evaluate.calibrate.candidates import Bench
from siftkv.evaluate.calibrate.fragility import Fragility, measure_fragility
from siftkv.evaluate.calibrate.goal import Goal
from siftkv.evaluate.calibrate.run import Calibration, Settings, expected_runs
from siftkv.models import LoadedModel
from siftkv.models.fingerprint import model_fingerprint
from siftkv.policies import Policy
from siftkv.policies.profile_file import Data, Figures, Keys, Profile, ProfiledModel

__all__ = ["Goal", "calibrate", "expected_steps"]

CONDITIONING = "full"
"""What is calibrated for: the engine's default."""


def calibrate(
    model: LoadedModel,
    texts: Sequence[Text],
    policy: Policy,
    goal: Goal,
    protocol: Protocol,
    kernels: str = "auto",
    progress: Callable[[], None] = lambda: None,
) -> Profile:
    """Find settings of `policy` that reach `goal`, measure them on as much text again, and tell all of it.

    protocol: `windows` of every text choose the settings, the next `windows` are held out. rows: requests in a batch.
    kernels: as in `LLM`. progress: called after each decode step. Raises SiftKVError where a text is too short or no
    setting reaches the goal, PolicyError for a policy without a knob.
    """
    cut = windows_of(model, texts, replace(protocol, windows=2 * protocol.windows))
    chosen_by = [w for w in cut if w.index < protocol.windows]
    held_out = [w for w in cut if w.index >= protocol.windows]
    conditioning = condition(model, CONDITIONING)
    fragility = measure_fragility(model.decoder, conditioning, chosen_by[0].ids[: protocol.prompt])
    found = Calibration(Bench(model, chosen_by, protocol, kernels, progress), goal, fragility).run(policy)
    [checked] = Bench(model, held_out, protocol, kernels, progress)([found.whole])
    return _profile(model, texts, goal, protocol, fragility, found, checked)


def expected_steps(model: LoadedModel, policy: Policy, texts: int, protocol: Protocol) -> int:
    """About how many decode steps `calibrate` takes; often fewer."""
    return protocol.forced * expected_runs(model, policy, texts * protocol.windows, protocol)


def _profile(
    model: LoadedModel,
    texts: Sequence[Text],
    goal: Goal,
    protocol: Protocol,
    fragility: Fragility,
    found: Settings,
    checked: Figures,
) -> Profile:
    config, decoder = model.config, model.decoder
    digest = hashlib.sha256("\0".join(text.text for text in texts).encode()).hexdigest()[:16]
    sizes = {k: v for k, v in asdict(protocol).items() if k != "rows"}
    return Profile(
        model=ProfiledModel(
            name=model.name,
            fingerprint=model_fingerprint(decoder),
            architecture=config.architecture,
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=str(decoder.dtype).removeprefix("torch."),
            device=decoder.device.type,
        ),
        conditioning=CONDITIONING,
        policy=found.policy.describe(),
        precise_keys=list(found.precise),
        target=goal.target,
        reached=found.reached,
        held_out=checked,
        fragile=fragility.fragile(),
        keys=Keys(**{k: _rounded(getattr(fragility, k).tolist()) for k in ("error", "relative", "shift")}),
        data=Data(texts=[text.name for text in texts], sha256=digest, **sizes),
        path=found.tried,
        versions=current_versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in row] for row in rows]
