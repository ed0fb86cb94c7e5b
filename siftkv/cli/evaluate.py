"""`siftkv eval`: what a sifted cache costs in quality, on the user's own model and text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siftkv.cli import options
from siftkv.cli.console import Counter, busy, fetched, plain_table, say, stdout_console
from siftkv.data import TEXTS
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from siftkv.evaluate.gate_results import GateSummary
    from siftkv.evaluate.report import Report
    from siftkv.models import LoadedModel

app = typer.Typer(no_args_is_help=True, help="Measure what a sifted cache costs in quality, and write a report.")

Settings = Annotated[
    list[str] | None,
    typer.Option("--kv", help="A setting of the KV cache; repeatable. full is always run.", show_default=False),
]
Device = options.Device
Out = Annotated[
    str, typer.Option("--out", help="Folder of records, report and pictures; an interrupted run continues from it.")
]
Resamples = Annotated[int, typer.Option(min=20, help="Bootstrap draws behind every interval.")]
DEFAULT_KV = ("uniform:k8v4", "uniform:k4v4", "diffkv")


@app.command()
def gate(
    model: options.Model = "smollm2-135m",
    kv: Settings = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A text: .txt, or .jsonl whose 'text' fields are joined; repeatable.  [default: both shipped stories]",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a window that are prefilled and sifted.")] = 1536,
    forced: Annotated[int, typer.Option(help="Tokens after the prompt that are fed one by one and compared.")] = 512,
    windows: Annotated[int, typer.Option(help="Windows a text.")] = 2,
    offset: Annotated[int, typer.Option(help="Token at which the first window of a text starts.")] = 0,
    rows: Annotated[int, typer.Option(help="Requests in a batch at most.")] = 8,
    buckets: Annotated[int, typer.Option(min=1, help="Position buckets, in which drift shows.")] = 8,
    resamples: Resamples = 1000,
    out: Out = "siftkv-eval/gate",
    device: Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    """Compare next-token distributions with those of the full cache: fast, sensitive, and on any text.

    Every window is prefilled and sifted, then the tokens that really follow are fed one by one through the decode path,
    beside a full cache in the same batch; all positions count.

    \b
    Examples:
      siftkv eval gate
      siftkv eval gate --kv uniform:k4v4 --kv diffkv:alpha_low=0.05 --data my.txt --windows 4
      siftkv eval gate --model ./qwen --device cuda --prompt 1024 --forced 7168 --windows 1 --rows 16
    """
    with busy("Starting"):
        from siftkv.benchmarks.fidelity import Protocol, distinct, windows_of
        from siftkv.benchmarks.texts import read_text
        from siftkv.evaluate import gate as measure
        from siftkv.evaluate import gate_bars, gate_plots, gate_results
        from siftkv.evaluate.report import RECORDS, Report
        from siftkv.evaluate.resume import Records, fingerprint

        protocol = Protocol(prompt, forced, windows, offset, rows)
        settings = distinct(["full", *(kv or DEFAULT_KV)])
        texts = [read_text(source) for source in data or TEXTS]
    loaded = load(model, dtype, device)
    cut = windows_of(loaded, texts, protocol)
    identity = {"model": fingerprint(loaded), "prompt": prompt, "forced": forced} | version()
    records = Records(Path(out) / RECORDS, identity)
    steps = forced * sum(len(b) for _, b in measure.pending(loaded, cut, settings, protocol, records))
    with Counter("Feeding tokens", steps) as counter:
        found = measure.run(loaded, cut, settings, protocol, records, progress=counter.advance)
    summaries, gaps = gate_results.summarise(found, buckets, resamples=resamples)
    about = about_model(loaded) | {"protocol": asdict(protocol), "texts": [t.name for t in texts]}
    title = f"{loaded.name}, {len(cut)} x {prompt} tokens of prompt, then {forced} fed"
    gate_plots.draw(summaries, out, title)
    sections = gate_results.gate_sections(summaries, gaps)
    bars = gate_bars.bar_rows(loaded.name, summaries) if (prompt, forced) == gate_bars.WINDOW else []
    figures = [*bars, *gate_results.gate_rows(summaries)]
    data_kept = gate_results.gate_data(summaries, gaps, about)
    _show_gate(summaries)
    finish(Report("gate", f"Gate of {title}", figures, data_kept, sections, gate_plots.PICTURES), out)


def _show_gate(summaries: list[GateSummary]) -> None:
    table = plain_table()
    table.add_column("setting")
    for name in ("mean KL", "95 % interval", "p90", "worst 10%", "top-1", "ppl ratio", "drift", "physical", "peak"):
        table.add_column(name, justify="right")
    for s in summaries:
        m = s.metrics
        kl = m["mean_kl"]
        table.add_row(
            s.kv,
            f"{kl.value:.5f}",
            f"{kl.low:.5f}-{kl.high:.5f}",
            f"{m['p90_kl'].value:.5f}",
            f"{m['worst_decile_kl'].value:.5f}",
            f"{m['top1_agreement'].value:.1%}",
            f"{m['perplexity_ratio'].value:.4f}",
            "-" if s.drift is None else f"{s.drift:.2f}",
            f"{s.size.ratio:.1%}",
            f"{s.size.peak_ratio:.1%}",
        )
    stdout_console().print(table)


def load(model: str, dtype: str, device: str) -> LoadedModel:
    """A model, fetched if it is built in, with progress on stderr."""
    fetched(model)
    with busy(f"Loading {model}"):
        from siftkv.models import load_model

        return load_model(model, dtype, device)


def about_model(model: LoadedModel) -> dict[str, Any]:
    """What a report says about the model."""
    decoder = model.decoder
    return {
        "model": model.name,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "device": decoder.device.type,
    }


def version() -> dict[str, str]:
    """The part of a record's identity that changes with the package."""
    from siftkv import __version__

    return {"siftkv": __version__}


def finish(report: Report, out: str) -> None:
    """Write a report and say where."""
    report.write(out)
    say(f"report: {Path(out) / 'report.md'}")


def number_list(text: str, name: str) -> list[int]:
    """`512,4096` as numbers. Raises SiftKVError for anything else."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise SiftKVError(f"--{name} {text!r} is not a list of whole numbers such as 512,4096")
    return values
