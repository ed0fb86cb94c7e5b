"""`siftkv bench`: fidelity against bytes, and speed against transformers; further benches are beside it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siftkv.cli import options
from siftkv.cli.console import Counter, busy, check_writable, plain_table, say, size, stdout_console
from siftkv.data import TEXTS
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from siftkv.benchmarks.cpu import Speed
    from siftkv.benchmarks.fidelity_results import Summary
    from siftkv.benchmarks.results import Row
    from siftkv.models import LoadedModel

app = typer.Typer(no_args_is_help=True, help="Measure fidelity, speed and servers, and write results files.")


def _writable(path: str | None) -> str | None:
    check_writable(path)
    return path


Json = Annotated[
    str | None,
    typer.Option("--json", help="Write a results file.", metavar="FILE", show_default=False, callback=_writable),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot", help="Write a picture (.png, .svg, .pdf).", metavar="FILE", show_default=False, callback=_writable
    ),
]
_TEXT = "A text: a .txt file, a .jsonl file whose 'text' fields are joined, or a shipped story; repeatable."
_SETTING = "A setting of the KV cache; repeatable."


@app.command()
def fidelity(
    model: options.Model = "smollm2-135m",
    data: Annotated[list[str] | None, typer.Option(help=f"{_TEXT}  [default: {TEXTS[0]}]", show_default=False)] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a window that are prefilled and sifted.")] = 1536,
    forced: Annotated[int, typer.Option(help="Tokens after the prompt that are fed one by one and compared.")] = 512,
    kv: Annotated[
        list[str] | None,
        typer.Option("--kv", help=f"{_SETTING}  [default: full, uniform:k8v4, k4v4, k4v2, diffkv]", show_default=False),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid/--no-grid", help="Add the diffkv curve over its two thresholds.")
    ] = False,
    windows: Annotated[int, typer.Option(help="Windows a text.")] = 1,
    offset: Annotated[int, typer.Option(help="Token at which the first window of a text starts.")] = 0,
    rows: Annotated[int, typer.Option(help="Requests in a batch at most.")] = 8,
    dtype: options.Dtype = "auto",
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Compare sifted caches with the full one: KL, top-1 agreement and perplexity against physical bytes.

    Each window is prefilled and sifted, then the tokens that really follow are fed one by one through the decode path,
    beside a full cache in the same batch. Window i of a text starts at token offset + i * (prompt + forced).

    \b
    Examples:
      siftkv bench fidelity
      siftkv bench fidelity --kv uniform:k8v4 --kv diffkv:alpha_low=0.05 --prompt 512 --forced 128
      siftkv bench fidelity --grid --data wiki.jsonl --data the_red_headed_league --json grid.json --plot grid.png
    """
    with busy("Starting"):
        from siftkv.benchmarks import fidelity as bench
        from siftkv.benchmarks import fidelity_results as results
        from siftkv.benchmarks.texts import read_text

        protocol = bench.Protocol(prompt, forced, windows, offset, rows)
        settings = bench.distinct([*(kv or bench.SETTINGS), *(bench.grid() if grid else [])])
        texts = [read_text(source) for source in data or TEXTS[:1]]
    loaded = _load(model, dtype)
    plan = bench.plan(loaded, bench.windows_of(loaded, texts, protocol), settings, protocol)
    with Counter("Feeding tokens", plan.steps) as counter:
        found = bench.measure(loaded, plan, progress=counter.advance)
    summaries = results.summarise(found)
    names = [text.name for text in texts]
    about = _about(loaded) | {"protocol": asdict(protocol), "texts": names}
    _show_fidelity(summaries)
    finish("fidelity", results.rows(summaries), results.to_data(found, summaries, about), json_file)
    if plot is not None:
        from siftkv.benchmarks.plots import plot_fidelity

        plot_fidelity(summaries, plot, f"{loaded.name}, {prompt} tokens of prompt, {forced} fed: {', '.join(names)}")


@app.command()
def cpu(
    model: options.Model = "smollm2-135m",
    contexts: Annotated[str, typer.Option(help="Prompt lengths in tokens, separated by commas.")] = "512,4096",
    batches: Annotated[str, typer.Option(help="Requests at a time, separated by commas.")] = "1,8",
    new_tokens: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 32,
    kv: Annotated[
        list[str] | None, typer.Option("--kv", help=f"{_SETTING}  [default: full, diffkv]", show_default=False)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every engine runs every case, in turns.")] = 3,
    data: Annotated[
        list[str] | None, typer.Option(help=f"{_TEXT}  [default: all shipped stories]", show_default=False)
    ] = None,
    dtype: options.Dtype = "auto",
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Compare prompt and decode speed with transformers' generate on this machine's CPU, and see how a prompt is held.

    Engines take turns, each case is warmed up first, and medians are compared.

    \b
    Examples:
      siftkv bench cpu
      siftkv bench cpu --contexts 512 --batches 1 --new-tokens 16 --kv full --kv diffkv:alpha_low=0.05
      siftkv bench cpu --json cpu.json --plot cpu.png
    """
    with busy("Starting"):
        import torch

        from siftkv.benchmarks import cpu as bench
        from siftkv.benchmarks import cpu_results as results
        from siftkv.benchmarks.fidelity import distinct
        from siftkv.benchmarks.results import current_hardware
        from siftkv.benchmarks.texts import Text, read_text

        cases = [bench.Case(c, b, new_tokens) for c in _numbers(contexts) for b in _numbers(batches)]
        settings = distinct(kv or bench.SETTINGS)
        parts = [read_text(source) for source in data or TEXTS]
        text = Text("+".join(p.name for p in parts), "".join(p.text for p in parts))
    loaded = _load(model, dtype)
    with busy("Loading transformers"):
        reference = bench.load_reference(model, loaded.decoder.dtype)
    speeds = bench.compare(loaded, reference, settings, cases, text, repeats, progress=say)
    with busy("Tracing a prompt"):
        memory = bench.prompt_memory(loaded, settings, text, max(case.context for case in cases))
    about = _about(loaded) | {"threads": torch.get_num_threads(), "text": text.name, "repeats": repeats}
    _show_cpu(speeds)
    finish("cpu", results.rows(speeds, memory), results.to_data(speeds, memory, about), json_file)
    if plot is not None:
        from siftkv.benchmarks.plots import plot_cpu

        plot_cpu(speeds, plot, f"{loaded.name} on {current_hardware().cpu}, {torch.get_num_threads()} threads")


def _load(model: str, dtype: str) -> LoadedModel:
    with busy("Starting"):
        from siftkv.models import list_models, load_model, pull
    if model in [m.name for m in list_models()]:
        pull(model)
    with busy(f"Loading {model}"):
        return load_model(model, dtype)


def _about(model: LoadedModel) -> dict[str, Any]:
    return {"model": model.name, "dtype": str(model.decoder.dtype).removeprefix("torch.")}


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SiftKVError(f"{text!r} is not a list of whole numbers such as 512,4096") from None


def _show_fidelity(summaries: list[Summary]) -> None:
    from siftkv.benchmarks.fidelity_results import ALL_TEXTS

    table = plain_table()
    for name in ("setting", "text"):
        table.add_column(name)
    for name in ("mean KL", "p90", "worst 10%", "top-1", "ppl ratio", "physical", "peak", "of bf16", "tokens by tier"):
        table.add_column(name, justify="left" if name == "tokens by tier" else "right")
    shown = summaries if len({s.text for s in summaries}) > 2 else [s for s in summaries if s.text != ALL_TEXTS]
    for before, s in zip([None, *shown], shown):
        first = before is None or before.kv != s.kv
        table.add_row(
            s.kv if first else "",
            s.text,
            *(f"{kl:.5f}" for kl in (s.mean_kl, s.p90_kl, s.worst_decile_kl)),
            f"{s.top1:.1f}%",
            f"{s.perplexity_ratio:.4f}",
            size(s.physical_bytes),
            size(s.peak_bytes),
            f"{s.ratio:.1%}",
            ", ".join(f"{tier} {share:.0%}" for tier, share in s.tiers.items() if share),
        )
    stdout_console().print(table)


def _show_cpu(speeds: list[Speed]) -> None:
    table = plain_table()
    for name in ("engine", "context", "batch", "prefill tok/s", "decode tok/s", "median step", "KV bytes", "peak"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for s in speeds:
        table.add_row(
            s.engine,
            str(s.case.context),
            str(s.case.batch),
            f"{s.prefill_tokens_s:.1f}",
            f"{s.decode_tokens_s:.1f}",
            f"{1000 * s.step_s:.1f} ms",
            size(s.kv_bytes),
            size(s.kv_peak_bytes),
        )
    stdout_console().print(table)


def finish(name: str, rows: list[Row], data: Any, path: str | None, plot: str | None = None) -> None:
    """Print how the figures stand against their bars, and write the results file and the picture of its rows."""
    from siftkv.benchmarks.results import ResultsFile

    held = [row for row in rows if row.bar is not None]
    if held:
        table = plain_table()
        for column in ("figure", "value", "unit", "bar", ""):
            table.add_column(column, justify="right" if column == "value" else "left")
        for row in held:
            value = f"{row.value:.4g}" if isinstance(row.value, (int, float)) else "none"
            table.add_row(row.what, value, row.unit, row.bar, "met" if row.ok else "missed")
        stdout_console().print(table)
    results = ResultsFile(name=name, command=shlex.join(["siftkv", *sys.argv[1:]]), rows=rows, data=data)
    if path is not None:
        results.write(path)
    if plot is not None:
        from siftkv.benchmarks.row_plots import plot_rows, title_of

        plot_rows(rows, plot, title_of(results))
