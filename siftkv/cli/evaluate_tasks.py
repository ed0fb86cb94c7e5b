"""`siftkv eval tasks`: problems with answers that can be checked, under every setting."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli import options
from siftkv.cli.console import Counter, busy, plain_table, say, stdout_console
from siftkv.cli.evaluate import DEFAULT_KV, Device, Out, Settings, about_model, finish, load, version
from siftkv.cli.serve import parse_size
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from siftkv.evaluate.tasks.results import TaskScore

_SAMPLING = "Sampling"


def tasks(
    model: options.Model = "smollm2-135m",
    kv: Settings = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="TASK=FILE, a public set as .jsonl, .jsonl.gz or .json for gsm8k, math500, aime24, aime25, umath, "
            "humaneval or mbpp; repeatable.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="A task that needs no file: strict_json or tool_call; repeatable.  [default: both, without --data]",
            show_default=False,
        ),
    ] = None,
    examples: Annotated[
        list[str] | None,
        typer.Option(
            help="TASK=FILE, worked examples before each problem as earlier turns of its conversation: lines with "
            "'question' and 'answer'; repeatable.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First problems of each task.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", rich_help_panel=_SAMPLING)] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Draw from the likeliest tokens whose probabilities reach this sum.", rich_help_panel=_SAMPLING
        ),
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 = all.", rich_help_panel=_SAMPLING)] = 0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens below this share of the likeliest one's probability.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="The same draws under every setting.", rich_help_panel=_SAMPLING)] = 0,
    repeats: Annotated[int, typer.Option(help="Answers a problem; needs sampling.", rich_help_panel=_SAMPLING)] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the whole KV cache: 12GiB, 800MB; requests that find no room wait.  "
            "[default: room for all of a batch]",
            show_default=False,
        ),
    ] = None,
    out: Out = "siftkv-eval/tasks",
    device: Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    """Solve problems and compare with the full cache, answer by answer.

    Reports accuracy with the paired difference to full, output lengths, answers cut at the limit or without the asked
    form, solved problems a minute, physical bytes, and every answer that flipped. Code that the model writes is run in
    a process with limits on time and memory, in an empty folder, without a network where the machine allows it.

    \b
    Examples:
      siftkv eval tasks --limit 10
      siftkv eval tasks --data gsm8k=test.jsonl --limit 50 --kv uniform:k4v4 --kv diffkv
      siftkv eval tasks --model ./qwen --device cuda --batch 64 --data aime24=aime24.jsonl --data aime25=aime25.jsonl \\
        --max-tokens 16384 --temperature 0.6 --top-p 0.95 --repeats 8
    """
    with busy("Starting"):
        from siftkv.benchmarks.fidelity import distinct
        from siftkv.evaluate.code_sandbox import network_guard
        from siftkv.evaluate.report import RECORDS, Report
        from siftkv.evaluate.resume import Records, fingerprint
        from siftkv.evaluate.tasks import plots, results
        from siftkv.evaluate.tasks import run as bench
        from siftkv.evaluate.tasks.examples import with_examples

        files, shown = _files("--data", data or []), _files("--examples", examples or [])
        made = task or ([] if files else ["strict_json", "tool_call"])
        problems = with_examples(bench.gather(files, made, limit, seed), shown)
        sampling = bench.Sampling(max_tokens, temperature, top_p, top_k, min_p, seed, repeats)
        settings = distinct(["full", *(kv or DEFAULT_KV)])
        pool = parse_size("--kv-cache-memory", kv_cache_memory) if kv_cache_memory else None
    runs_code = {"humaneval", "mbpp"} & files.keys()
    if runs_code and not network_guard():
        say("note: this machine cannot take the network away from a process; the model's code runs with it")
    loaded = load(model, dtype, device)
    records = Records(Path(out) / RECORDS, {"model": fingerprint(loaded)} | version())
    with Counter("Answering", bench.pending(loaded, problems, settings, sampling, records)) as counter:
        answers = bench.run(
            loaded, problems, settings, sampling, records, batch, progress=counter.advance, memory_bytes=pool
        )
    scores, flipped = results.summarise(answers), results.flips(answers)
    title = f"{loaded.name}: {', '.join(dict.fromkeys(p.task for p in problems))}"
    pictures = plots.draw(scores, out, title)
    _show(scores)
    about = about_model(loaded) | {"sampling": asdict(sampling), "batch": batch, "examples": sorted(shown)}
    about["kv_cache_memory_bytes"] = pool
    if runs_code:
        about["code_without_network"] = bool(network_guard())
    kept = results.task_data(scores, flipped, answers, about)
    report = Report("tasks", title, results.task_rows(scores), kept, results.task_sections(scores, flipped), pictures)
    finish(report, out)


def _files(option: str, data: list[str]) -> dict[str, str]:
    """`TASK=FILE` as a mapping. Raises SiftKVError for anything else."""
    files: dict[str, str] = {}
    for part in data:
        name, equals, path = part.partition("=")
        if not equals or not path:
            raise SiftKVError(f"{option} {part!r}: write TASK=FILE, such as gsm8k=test.jsonl")
        if name in files:
            raise SiftKVError(f"{option} names {name} twice: join the files first")
        files[name] = path
    return files


def _show(scores: list[TaskScore]) -> None:
    table = plain_table()
    for name in ("setting", "task"):
        table.add_column(name)
    for name in ("accuracy", "loss", "bound", "tokens", "x full", "cut", "invalid", "solved/min", "physical", "peak"):
        table.add_column(name, justify="right")
    for s in scores:
        against = s.against_full if s.kv != "full" else None
        loss = [f"{100 * against.loss.value:+.1f}", f"{100 * against.bound:+.1f}"] if against else ["-", "-"]
        table.add_row(
            s.kv,
            s.task,
            f"{s.accuracy.value:.1%}",
            *loss,
            f"{s.mean_tokens:.0f}",
            f"{against.length_ratio:.2f}" if against else "-",
            f"{s.truncated:.0%}",
            f"{s.invalid:.0%}",
            f"{s.solved_per_minute:.2f}",
            f"{s.ratio:.1%}",
            f"{s.peak_ratio:.1%}",
        )
    stdout_console().print(table)
