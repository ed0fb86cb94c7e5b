"""`siftkv bench serve`: load an OpenAI-compatible server and measure how it answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from siftkv.cli.bench import Json, Plot, finish
from siftkv.cli.console import busy, check_writable, plain_table, say, stdout_console
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from siftkv.benchmarks.serve import LoadLevel, Point, Slo
    from siftkv.benchmarks.serve_disturb import Disturbed
    from siftkv.benchmarks.serve_load import Target, Work

_PROMPTS, _LIMITS, _DISTURB = "Prompts", "What counts as good", "Disturbance"
_MS = 1e-3


def serve(
    url: Annotated[str, typer.Option(help="The server, without /v1. None is started.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model to ask for.  [default: the first it lists]")] = "",
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    api_key: Annotated[
        str | None, typer.Option(help="Key that the server asks for.", envvar="OPENAI_API_KEY", show_default=False)
    ] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="KV setting to ask a SiftKV server for.")] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Open loop: requests a second, Poisson; several with commas, inf = all at once."),
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: clients that never pause; several with commas.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at each level.")] = 100,
    duration: Annotated[float | None, typer.Option(min=0.1, help="Seconds at each level, instead.")] = None,
    ramp: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Rates follow one another without a pause, and requests of each one's first so many seconds are load "
            "alone; needs --duration.",
            show_default=False,
        ),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before anything is measured.")] = 4,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and disturbances.")] = 0,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A .jsonl file with prompt (and max_tokens), or one prompt a line.", rich_help_panel=_PROMPTS
        ),
    ] = None,
    prompt_length: Annotated[
        int, typer.Option(help="Words of the shipped stories in a prompt; tokens with --random-ids.")
    ] = 200,
    random_ids: Annotated[
        int | None, typer.Option(help="Send random token ids below this number.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ask for exactly that many.")] = False,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    slo_ttft: Annotated[float | None, typer.Option(help="Time to first token, ms.", rich_help_panel=_LIMITS)] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Mean time of a further token, ms.", rich_help_panel=_LIMITS)
    ] = None,
    slo_e2e: Annotated[float | None, typer.Option(help="Whole answer, ms.", rich_help_panel=_LIMITS)] = None,
    disturb: Annotated[
        bool,
        typer.Option(
            "--disturb", help="Run twice, then with clients that leave and nonsense.", rich_help_panel=_DISTURB
        ),
    ] = False,
    leave_share: Annotated[
        float, typer.Option(help="Share that goes away at a random point.", rich_help_panel=_DISTURB)
    ] = 0.3,
    malformed_share: Annotated[float, typer.Option(help="Share that is malformed.", rich_help_panel=_DISTURB)] = 0.1,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that send the load: one reads some 5,000 tokens a second.")
    ] = 1,
    label: Annotated[str | None, typer.Option(help="Name of this run.  [default: the kv setting or model]")] = None,
    compare: Annotated[
        list[str] | None, typer.Option(help="Results files of other runs to draw beside this one; repeatable.")
    ] = None,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Load an OpenAI-compatible server: latency percentiles, goodput and errors against the request rate.

    \b
    Examples:
      siftkv bench serve --rate 0.5,1,2,4 --requests 60 --json full.json
      siftkv bench serve --rate 1,2,4,8 --kv diffkv --compare full.json --plot latency.png
      siftkv bench serve --rate 1,2,4,8 --duration 60 --ramp 20 --random-ids 32000 --ignore-eos
      siftkv bench serve --concurrency 64 --duration 300 --slo-ttft 2000 --slo-tpot 200
      siftkv bench serve --disturb --requests 1000 --concurrency 32
    """
    for path in (json_file, plot):
        check_writable(path)
    with busy("Starting"):
        from siftkv.benchmarks.serve import Slo
        from siftkv.benchmarks.serve_load import Target, served_model

    extra: dict[str, Any] = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})
    target = Target(url, model, _endpoint(endpoint), api_key, extra | ({"kv": kv} if kv else {}))
    target = _with_model(target, asyncio.run(served_model(target)))
    make = _Maker(prompts, prompt_length, random_ids, max_tokens)
    name = label or kv or target.model
    about = {"url": url, "model": target.model, "endpoint": endpoint, "requests": requests, "seed": seed}
    about |= {"max_tokens": max_tokens, "extra": target.extra, "prompts": make.told}
    if disturb:
        clients = int(_levels(None, concurrency or "16")[0].value)
        _disturb(target, make, requests, clients, (leave_share, malformed_share), seed, name, about, json_file)
        return
    levels = _levels(rate, concurrency)
    slo = Slo(*(None if limit is None else limit * _MS for limit in (slo_ttft, slo_tpot, slo_e2e)))
    size = (requests, duration, ramp, seed, warmup, processes)
    _load(target, levels, make, size, slo, name, about, json_file, plot, compare or [])


class _Maker:
    """Makes requests as the options say."""

    def __init__(self, path: str | None, length: int, vocab: int | None, max_tokens: int) -> None:
        from siftkv.benchmarks.serve_prompts import file_prompts

        self._fixed = file_prompts(path, max_tokens) if path else None
        self._length, self._vocab, self._max_tokens = length, vocab, max_tokens
        made = f"{length} random token ids" if vocab else f"{length} words of the shipped stories"
        self.told = path or made

    def __call__(self, count: int, generator: random.Random) -> list[Work]:
        from siftkv.benchmarks.serve_prompts import random_id_prompts, story_prompts

        if self._fixed:
            return [generator.choice(self._fixed) for _ in range(count)]
        if self._vocab:
            return random_id_prompts(count, self._length, self._vocab, self._max_tokens, generator)
        return story_prompts(count, self._length, self._max_tokens, generator)


def _endpoint(name: str) -> Literal["completions", "chat"]:
    if name not in ("completions", "chat"):
        raise SiftKVError(f"unknown endpoint {name!r}: use completions or chat")
    return "chat" if name == "chat" else "completions"


def _with_model(target: Target, model: str) -> Target:
    from dataclasses import replace

    return replace(target, model=model)


def _levels(rate: str | None, concurrency: str | None) -> list[LoadLevel]:
    from siftkv.benchmarks.serve import LoadLevel

    found = [LoadLevel("rate", value) for value in _numbers(rate, "--rate")]
    found += [LoadLevel("clients", value) for value in _numbers(concurrency, "--concurrency")]
    if not found:
        raise SiftKVError("say how much load: --rate 1,2,4 or --concurrency 8")
    if not all(level.kind == "rate" or level.value.is_integer() for level in found):
        raise SiftKVError("--concurrency takes whole numbers of clients")
    return found


def _stairs(levels: Sequence[LoadLevel], seconds: float | None, ramp: float) -> list[float]:
    rates = [level.value for level in levels if level.kind == "rate"]
    if seconds is None or not ramp < seconds or len(rates) != len(levels) or rates != sorted(rates):
        raise SiftKVError("--ramp needs ascending --rate alone, and a longer --duration: --rate 1,2,4 --duration 60")
    return rates


def _numbers(text: str | None, option: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0.0]
    if not all(value > 0 for value in found):
        raise SiftKVError(f"{option} {text}: give positive numbers such as 1,2,4")
    return found


def _load(
    target: Target,
    levels: Sequence[LoadLevel],
    make: _Maker,
    size: tuple[int, float | None, float | None, int, int, int],
    slo: Slo,
    label: str,
    about: dict[str, Any],
    json_file: str | None,
    plot: str | None,
    compare: Sequence[str],
) -> None:
    from dataclasses import asdict

    from siftkv.benchmarks import serve as bench
    from siftkv.benchmarks.results import ResultsFile
    from siftkv.benchmarks.serve_fleet import Fleet
    from siftkv.benchmarks.serve_stairs import climb

    others = dict(bench.from_data(ResultsFile.read(path).data, path) for path in compare)
    requests, seconds, ramp, seed, warmup, processes = size
    fleet = Fleet(processes)
    if ramp is None:
        run = bench.measure(target, levels, make, requests, seconds, seed, warmup, slo, fleet, say)
    else:
        run = climb(target, _stairs(levels, seconds, ramp), make, seconds or 0, ramp, seed, warmup, slo, fleet, say)
    points = asyncio.run(run)
    _show(points)
    turn = bench.knee(points)
    if turn is not None:
        say(f"the server keeps up to {turn:g} requests/s: latency a token within {bench.KNEE:g} x the lowest, no queue")
    about |= {"slo": asdict(slo), "duration": seconds, "ramp": ramp, "warmup": warmup, "processes": processes}
    rows = [*bench.rows(points, label), *bench.against(points, label, others)]
    finish("serve", rows, bench.to_data(points, label, about), json_file)
    if plot is not None:
        from siftkv.benchmarks.serve_plot import plot_latency

        runs = {**others, label: points}
        plot_latency(runs, plot, f"{target.model}: {make.told}, up to {about['max_tokens']} tokens out")


def _disturb(
    target: Target,
    make: _Maker,
    requests: int,
    clients: int,
    shares: tuple[float, float],
    seed: int,
    label: str,
    about: dict[str, Any],
    json_file: str | None,
) -> None:
    from siftkv.benchmarks import serve_disturb as bench

    found: Disturbed = asyncio.run(bench.run_disturbed(target, make, requests, clients, *shares, seed))
    say(f"{found.untouched} requests were left alone: {found.same} of their texts are those of an undisturbed run")
    about |= {"clients": clients, "leave_share": shares[0], "malformed_share": shares[1]}
    finish("serve_disturbed", bench.rows(found, label), bench.to_data(found, label, about), json_file)


def _show(points: Sequence[Point]) -> None:
    table = plain_table()
    columns = (
        "load",
        "answered",
        "goodput/s",
        "tok/s",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "whole p50",
        "p99",
        "ms/token",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "load" else "right")
    for p in points:
        spreads = [f"{1e3 * part[q]:.0f} ms" for part in (p.ttft, p.itl, p.e2e) for q in ("p50", "p99")]
        counts = (f"{p.ok}/{p.sent}", f"{p.goodput:.2f}", f"{p.output_tokens_per_second:.1f}")
        table.add_row(p.level.name, *counts, *spreads, f"{1e3 * p.per_token['mean']:.1f}")
    stdout_console().print(table)
    for p in points:
        for error, count in p.errors.items():
            say(f"{p.level.name}: {count} x {error}")
