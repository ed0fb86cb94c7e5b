"""`siftkv eval retrieval`: whether facts in a long context are still found once it is sifted."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli import options
from siftkv.cli.console import Counter, busy, plain_table, stdout_console
from siftkv.cli.evaluate import DEFAULT_KV, Device, Out, Settings, about_model, finish, load, number_list, version
from siftkv.data import TEXTS

if TYPE_CHECKING:
    from siftkv.evaluate.retrieval.results import Score


class Asked(StrEnum):
    """Whether the question is known when the context is sifted."""

    HIDDEN = "hidden"
    VISIBLE = "visible"
    BOTH = "both"


def retrieval(
    model: options.Model = "smollm2-135m",
    kv: Settings = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="single_needle, multi_key, multi_document, multi_needle, variable_tracking, common_words or "
            "frequent_words; repeatable.  [default: all]",
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens, separated by commas.")] = "1024,2048,4096",
    depths: Annotated[int, typer.Option(help="Places from start to end where an answer is put.")] = 5,
    samples: Annotated[int, typer.Option(help="Items a task, length and depth.")] = 2,
    seed: Annotated[int, typer.Option(help="The same seed makes the same items.")] = 0,
    question: Annotated[
        Asked, typer.Option(help="hidden: the context is sifted before the question is fed; visible: with it.")
    ] = Asked.BOTH,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A text to hide things in; repeatable.  [default: both shipped stories]", show_default=False),
    ] = None,
    qa: Annotated[
        str | None,
        typer.Option(help="A .jsonl of question, answer and docs (title, text, gold).", show_default=False),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Requests in a batch.")] = 4,
    out: Out = "siftkv-eval/retrieval",
    device: Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    """Ask for what stands somewhere in a long context: needles, variables, counts of words, facts in documents.

    Items are generated with a seed from a text. With a hidden question the context is prefilled and sifted first, and
    the question is fed through the decode path: a cache that serves any question is a harder test than one that was
    sifted for the one at hand.

    \b
    Examples:
      siftkv eval retrieval --task single_needle --lengths 1024 --depths 3 --samples 1
      siftkv eval retrieval --model ./qwen --device cuda --lengths 4096,16384 --kv sift:ratio=0.25 --rows 16
      siftkv eval retrieval --qa hotpot.jsonl --question hidden
    """
    with busy("Starting"):
        from siftkv.benchmarks.fidelity import distinct
        from siftkv.benchmarks.texts import read_text
        from siftkv.evaluate.report import RECORDS, Report
        from siftkv.evaluate.resume import Records, fingerprint
        from siftkv.evaluate.retrieval import plots, results
        from siftkv.evaluate.retrieval import run as bench
        from siftkv.evaluate.retrieval.items import Haystack

        grid = bench.Grid(tuple(task or bench.TASKS), tuple(number_list(lengths, "lengths")), depths, samples, seed)
        settings = distinct(["full", *(kv or DEFAULT_KV)])
        texts = [read_text(source) for source in data or TEXTS]
    loaded = load(model, dtype, device)
    with busy("Making items"):
        hay = Haystack(" ".join(t.text for t in texts), loaded.tokenizer)
        items = bench.make_items(hay, grid, qa)
    visible = {Asked.HIDDEN: [False], Asked.VISIBLE: [True], Asked.BOTH: [False, True]}[question]
    records = Records(Path(out) / RECORDS, {"model": fingerprint(loaded)} | version())
    with Counter("Answering", bench.pending(items, settings, visible, records)) as counter:
        outcomes = bench.run(loaded, items, settings, visible, records, rows, progress=counter.advance)
    scores = results.summarise(outcomes)
    title = f"{loaded.name}: retrieval from {', '.join(t.name for t in texts)}"
    pictures = plots.draw(scores, out, title)
    _show(scores)
    kept = results.retrieval_data(scores, outcomes, about_model(loaded) | {"grid": asdict(grid)})
    sections = results.retrieval_sections(scores, outcomes)
    finish(Report("retrieval", title, results.retrieval_rows(scores), kept, sections, pictures), out)


def _show(scores: list[Score]) -> None:
    from siftkv.evaluate.retrieval.results import ALL, seen

    tasks = list(dict.fromkeys(s.task for s in scores))
    table = plain_table()
    for name in ("setting", "asked"):
        table.add_column(name)
    for name in ("physical", "peak", "loss", *tasks):
        table.add_column(name, justify="right")
    for kv, visible in dict.fromkeys((s.kv, s.visible) for s in scores):
        own = {s.task: s for s in scores if (s.kv, s.visible) == (kv, visible)}
        whole = own[ALL]
        loss = "-" if whole.loss is None or kv == "full" else f"{100 * whole.loss.value:+.1f}"
        cells = [f"{100 * own[t].score:.1f}%" for t in tasks]
        table.add_row(kv, seen(visible), f"{whole.ratio:.1%}", f"{whole.peak_ratio:.1%}", loss, *cells)
    stdout_console().print(table)
