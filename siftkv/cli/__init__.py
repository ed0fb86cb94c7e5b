"""The command line: `siftkv generate`, `chat`, `serve`, `models`, `formats`, `demo`, `bench`, `eval`,
`lm-eval`, `calibrate`, `analyze` and `inspect`.

Nothing here imports torch before a command runs, so that help answers at once and the environment can still be set.
"""

from __future__ import annotations

import os

import typer

from siftkv.cli import (
    analyze,
    bench,
    bench_engine,
    bench_gpu,
    bench_overhead,
    bench_selection,
    bench_serve,
    calibrate,
    chat,
    demo,
    evaluate,
    evaluate_retrieval,
    evaluate_tasks,
    formats,
    generate,
    inspect,
    lm_eval,
    models,
    serve,
)
from siftkv.cli.group import Interrupts, SiftGroup

app = typer.Typer(
    cls=SiftGroup,
    name="siftkv",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run language models whose KV cache is sifted: every head keeps its own tokens, each as precise as need be.",
    epilog="Start with: siftkv demo. Every command has examples in its own --help.",
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(serve.serve)
app.command()(demo.demo)
app.command()(formats.formats)
app.add_typer(models.app, name="models")
bench.app.command()(bench_gpu.kernels)
bench.app.command()(bench_engine.throughput)
bench.app.command()(bench_engine.prompt)
bench.app.command()(bench_selection.selection)
bench.app.command()(bench_selection.drift)
bench.app.command()(bench_gpu.step)
bench.app.command()(bench_gpu.manager)
bench.app.command()(bench_gpu.latency)
bench.app.command()(bench_gpu.hardkv)
bench.app.command()(bench_serve.serve)
bench.app.command("serve-overhead")(bench_overhead.overhead)
app.add_typer(bench.app, name="bench")
evaluate.app.command()(evaluate_retrieval.retrieval)
evaluate.app.command()(evaluate_tasks.tasks)
app.add_typer(evaluate.app, name="eval")
app.command()(analyze.analyze)
app.command()(calibrate.calibrate)
app.command()(inspect.inspect)
app.command("lm-eval", context_settings=lm_eval.CONTEXT)(lm_eval.lm_eval)


def main() -> None:
    """Entry point of the `siftkv` script. Exit codes: 0, 2 for anything the user can mend, 130 for Ctrl-C."""
    # OpenMP threads that spin between parallel regions starve each other on small machines. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    Interrupts.watch()
    app()
