"""`siftkv calibrate`: settings for a target, on the user's own model and text, as a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli import options
from siftkv.cli.console import Counter, busy, check_writable, plain_table, say, stdout_console
from siftkv.cli.evaluate import Device, load
from siftkv.data import TEXTS
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from siftkv.policies.profile_file import Figures, Profile


def calibrate(
    model: options.Model = "smollm2-135m",
    policy: Annotated[
        str, typer.Option(help="What to set: uniform, diffkv, or a policy with a ratio; other settings may follow it.")
    ] = "diffkv",
    max_kl: Annotated[
        float | None, typer.Option(help="Mean KL to the full cache at most, in nats a token.", show_default=False)
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(help="Share of positions, 0 to 1, whose likeliest token must stay.", show_default=False),
    ] = None,
    target_ratio: Annotated[
        float | None, typer.Option(help="Physical bytes at most, as a share of bf16.", show_default=False)
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A text: .txt, or .jsonl whose 'text' fields are joined; repeatable.  [default: a shipped story]",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a window that are prefilled and sifted.")] = 1024,
    forced: Annotated[int, typer.Option(help="Tokens after the prompt that are fed one by one and compared.")] = 64,
    windows: Annotated[int, typer.Option(help="Windows a text to choose by; as many again are held out.")] = 3,
    offset: Annotated[int, typer.Option(help="Token at which the first window of a text starts.")] = 0,
    rows: Annotated[int, typer.Option(help="Requests in a batch at most.")] = 18,
    out: Annotated[str, typer.Option(help="The profile; a picture of the search goes beside it.")] = "profile.json",
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of a table.")] = False,
    device: Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    """Find settings for a target on a model and a text, and write a profile that --kv profile:FILE loads.

    With --max-kl or --min-agreement the smallest cache within that is looked for, with --target-ratio alone the best
    one of that size. Candidates run side by side against the full cache; what is chosen is measured again on text that
    played no part in the choice. Profiles are refused for other models.

    \b
    Examples:
      siftkv calibrate --max-kl 0.01
      siftkv calibrate --model ./qwen --device cuda --policy uniform --min-agreement 0.97 --data my.txt
      siftkv calibrate --policy diffkv:window=32 --target-ratio 0.3 --out small.json
      siftkv generate "Once upon a time" --kv profile:small.json
    """
    with busy("Starting"):
        from siftkv.benchmarks.fidelity import Protocol
        from siftkv.benchmarks.texts import read_text
        from siftkv.evaluate.calibrate import Goal, expected_steps
        from siftkv.evaluate.calibrate import calibrate as find
        from siftkv.evaluate.calibrate.knobs import steps_of
        from siftkv.evaluate.calibrate.plots import plot_search
        from siftkv.policies import Uniform, parse_policy

        goal = Goal(max_kl, target_ratio, min_agreement)
        base = parse_policy(policy)
        if not isinstance(base, Uniform):
            steps_of(base)
        protocol = Protocol(prompt, forced, windows, offset, rows)
        texts = [read_text(source) for source in data or TEXTS[-1:]]
        _check_out(out)
    loaded = load(model, dtype, device)
    steps = expected_steps(loaded, base, len(texts), protocol)
    with Counter("Searching", steps, remaining=True) as counter:
        profile = find(loaded, texts, base, goal, protocol, progress=counter.advance)
    profile.write(out)
    picture = Path(out).with_suffix(".png")
    plot_search(profile, picture)
    if as_json:
        print(profile.model_dump_json(indent=1))
    else:
        _show(profile)
    say(f"profile: {out}, picture: {picture}; use it with --kv profile:{out}")
    _doubts(profile)


def _check_out(out: str) -> None:
    if Path(out).suffix != ".json":
        raise SiftKVError(f"--out {out}: a profile is a .json file")
    check_writable(out)
    check_writable(str(Path(out).with_suffix(".png")))


def _show(profile: Profile) -> None:
    table = plain_table()
    table.add_column("tried")
    table.add_column("setting")
    for name in ("mean KL", "worst 10%", "top-1", "physical", "B/entry"):
        table.add_column(name, justify="right")
    for tried in profile.path:
        table.add_row(tried.step, _short(tried.kv), *_cells(tried.figures))
    table.add_section()
    chosen = _short(profile.policy)
    if profile.precise_keys:
        chosen += f", 8-bit keys in {len(profile.precise_keys)} heads"
    table.add_row("chosen", chosen, *_cells(profile.reached))
    if profile.held_out is not None:
        table.add_row("on other text", chosen, *_cells(profile.held_out))
    stdout_console().print(table)


def _short(kv: str) -> str:
    """A `kv` string without settings that keep their defaults."""
    from siftkv.policies import parse_policy

    kv, tail = (kv.partition(" with ")[i] for i in (0, 2))
    policy = parse_policy(kv)
    usual = parse_policy(policy.name).describe().partition(":")[2].split(",")
    changed = [part for part in policy.describe().partition(":")[2].split(",") if part not in usual]
    return f"{policy.name}{':' * bool(changed)}{','.join(changed)}{' with ' * bool(tail)}{tail}"


def _cells(figures: Figures) -> list[str]:
    return [
        f"{figures.mean_kl:.5f}",
        f"{figures.worst_decile_kl:.5f}",
        f"{figures.agreement:.1%}",
        f"{figures.ratio:.1%}",
        f"{figures.per_entry:.1f}",
    ]


def _fate(profile: Profile) -> str:
    from siftkv.evaluate.calibrate.run import HEADS

    if profile.precise_keys:
        return f"8-bit keys in {len(profile.precise_keys)} heads, those first"
    tried = any(HEADS in tried.step for tried in profile.path)
    return "8-bit keys were not worth their bytes there" if tried else "the target is met without 8-bit keys there"


def _doubts(profile: Profile) -> None:
    """What a user should know before relying on it."""
    target, held = profile.target, profile.held_out
    if profile.fragile:
        named = ", ".join(f"{layer}.{head}" for layer, head in profile.fragile[:8])
        more = f" and {len(profile.fragile) - 8} more" if len(profile.fragile) > 8 else ""
        say(f"fragile keys in (layer.head) {named}{more}: {_fate(profile)}")
    if held is not None and target.max_kl is not None and held.mean_kl > target.max_kl:
        say(f"note: on other text the KL is {held.mean_kl:.4f}, above {target.max_kl}: more windows make it surer")
    if held is not None and target.min_agreement is not None and held.agreement < target.min_agreement:
        say(
            f"note: on other text agreement is {held.agreement:.1%}, below {target.min_agreement:.1%}: use more windows"
        )
