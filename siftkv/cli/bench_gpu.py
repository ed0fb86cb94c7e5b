"""`siftkv bench kernels`, `step`, `manager`, `latency` and `hardkv`: speed of the parts on a GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from siftkv.cli.bench import Json, Plot, finish
from siftkv.cli.console import plain_table, say, stdout_console

if TYPE_CHECKING:
    from siftkv.benchmarks.results import Row

KERNEL_BARS = {
    "bf16 8k": 0.95,
    "k8v4 8k": 0.90,
    "k4v4 8k": 0.86,
    "k4v2 16k": 0.78,
    "k4v4 4k + k4v2 8k": 0.80,
    "k8v4 8k ragged": 0.81,
    "k8v4 8k group 7": 0.81,
    "k8v4 8k group 8": 0.81,
    "k8v4 16k head_dim 64": 0.81,
    "k8v4 128k batch 1": 0.6,
}
"""Least share of the card's read ceiling that decode attention is meant to reach."""


def kernels(json_file: Json = None, plot: Plot = None) -> None:
    """Time decode attention against what the same card reads in the same run.

    \b
    Examples:
      siftkv bench kernels
      siftkv bench kernels --json kernels.json --plot kernels.png
    """
    from siftkv.benchmarks.kernels import run_kernels
    from siftkv.benchmarks.results import Row

    found = run_kernels()
    rows = [
        Row(
            what=f"decode attention, {r.name}",
            value=r.share,
            unit="of the read ceiling",
            bar=f">= {KERNEL_BARS[r.name]}" if r.name in KERNEL_BARS else None,
        )
        for r in found
    ]
    table = plain_table("Decode attention on this GPU")
    for name in ("case", "us", "GB/s", "of the ceiling"):
        table.add_column(name)
    for r in found:
        table.add_row(r.name, f"{r.milliseconds * 1e3:.1f}", f"{r.gigabytes_per_second:.0f}", f"{r.share:.3f}")
    stdout_console().print(table)
    finish("kernels", rows, [r.as_dict() for r in found], json_file, plot)


STEP_BAR, SIFT_BAR, BOOKKEEPING_BAR = 1.25, 0.05, 0.005
"""Most that a step at batch 1 may take over reading the weights; most of a step for scores, policy and appending at the
default interval; most of a step for page bookkeeping.
"""


def step(json_file: Json = None, plot: Plot = None) -> None:
    """Time a decode step of a Llama-3-8B shape against reading its bytes, and what bookkeeping takes of it.

    \b
    Examples:
      siftkv bench step
      siftkv bench step --json step.json --plot step.png
    """
    from siftkv.benchmarks import step as bench
    from siftkv.benchmarks.results import Row
    from siftkv.benchmarks.throughput import random_llama

    ceiling, found, sift, pages = bench.run_steps(random_llama())
    rows: list[Row] = []
    table = plain_table(f"A decode step at {bench.CONTEXT} tokens of context, read ceiling {ceiling:.0f} GB/s")
    for name in ("setting", "batch", "ms", "floor ms", "x floor", "launches", "host us", "of bf16"):
        table.add_column(name)
    for r in found:
        where = f"step, {r.kv}, batch {r.batch}, {bench.CONTEXT} context"
        if r.batch == 1:
            bar = f"<= {STEP_BAR}" if r.kv == "full" else None
            rows.append(Row(what=where, value=r.ms / r.weights_floor_ms, unit="x reading weights", bar=bar))
        rows.append(Row(what=where, value=r.ms / r.floor_ms, unit="x reading weights, keys and values"))
        rows.append(Row(what=where, value=r.launches, unit="launches"))
        rows.append(Row(what=where, value=r.host_us, unit="us of the host"))
        cells = (f"{r.ms:.3f}", f"{r.floor_ms:.3f}", f"{r.ms / r.floor_ms:.3f}", str(r.launches), f"{r.host_us:.0f}")
        table.add_row(r.kv, str(r.batch), *cells, f"{r.physical:.3f}")
    stdout_console().print(table)
    for interval in (sift.default_interval, 1):
        bar = f"<= {SIFT_BAR}" if interval == sift.default_interval else None
        what = f"scores at interval {interval}, policy, append: {sift.kv}, batch {sift.batch}"
        rows.append(Row(what=what, value=sift.share(interval), unit="of the step", bar=bar))
    what = f"{pages.kv}, batch {pages.batch}"
    share, whole = (x / pages.step_ms for x in (pages.coordinate_ms, pages.sift_ms))
    rows.append(Row(what=f"page bookkeeping: {what}", value=share, unit="of the step", bar=f"<= {BOOKKEEPING_BAR}"))
    rows.append(Row(what=f"policy step with moving tokens: {what}", value=whole, unit="of the step"))
    data = {"ceiling": ceiling, "steps": [r.as_dict() for r in found], "sift": asdict(sift), "pages": asdict(pages)}
    finish("step", rows, data, json_file, plot)


def manager(json_file: Json = None, plot: Plot = None) -> None:
    """Play a trace of prompts, decode steps and releases on the GPU's memory manager and on the host's.

    \b
    Examples:
      siftkv bench manager
      siftkv bench manager --json manager.json --plot manager.png
    """
    from siftkv.benchmarks import manager as bench
    from siftkv.benchmarks.results import Row

    trace = bench.Trace()
    gpu, host = bench.run_manager(trace)
    table = plain_table(
        f"{trace.requests} requests, {trace.prompt} tokens of prompt, {trace.steps} steps; milliseconds"
    )
    for name in ("what", "GPU", f"host, {host.threads} threads", "times faster"):
        table.add_column(name)
    rows: list[Row] = []
    for what, quick, slow in (
        ("a prompt", gpu.prompt_ms, host.prompt_ms),
        ("a decode step", gpu.step_ms, host.step_ms),
        ("release of all", gpu.release_ms, host.release_ms),
    ):
        table.add_row(what, f"{quick:.3f}", f"{slow:.3f}", f"{slow / quick:.1f}")
        rows.append(Row(what=f"{what}: GPU", value=quick, unit="ms"))
        rows.append(Row(what=f"{what}: host, {host.threads} threads", value=slow, unit="ms"))
        rows.append(Row(what=f"{what}: GPU against host", value=slow / quick, unit="x"))
    stdout_console().print(table)
    finish("manager", rows, {"trace": asdict(trace), "gpu": gpu.as_dict(), "host": host.as_dict()}, json_file, plot)


def latency(json_file: Json = None, plot: Plot = None) -> None:
    """Split a decode step into its parts, and time one request of 4,096 tokens against the full cache.

    \b
    Examples:
      siftkv bench latency
      siftkv bench latency --json latency.json --plot latency.png
    """
    from siftkv.benchmarks import latency as bench
    from siftkv.benchmarks.results import Row
    from siftkv.benchmarks.throughput import random_llama

    model = random_llama()
    splits = [bench.split_step(model, kv, batch) for batch in bench.BATCHES for kv in bench.SETTINGS]
    whole = [bench.end_to_end(model, kv) for kv in bench.SETTINGS]
    table = plain_table(f"Milliseconds of a decode step at {bench.TOTAL} tokens of context; parts alone")
    for name in ("setting", "batch", "step", "projections", "attention", "sift", "sampling"):
        table.add_column(name)
    rows: list[Row] = []
    for s in splits:
        parts = {name: getattr(s, name) for name in ("step", "projections", "attention", "sift", "sampling")}
        table.add_row(s.kv, str(s.batch), *(f"{ms:.3f}" for ms in parts.values()))
        where = f"{s.kv}, batch {s.batch}, {bench.TOTAL} context"
        rows += [Row(what=f"{where}: {name}", value=ms, unit="ms") for name, ms in parts.items()]
    stdout_console().print(table)
    full = whole[0]
    for e in whole:
        where = f"one request, {e.kv}, {e.prompt} in, {e.output} out"
        say(f"{where}: {e.seconds:.3f} s, first token {e.first_token_s:.3f} s")
        rows.append(Row(what=where, value=e.seconds, unit="s"))
        rows.append(Row(what=f"{where}: time", value=e.seconds / full.seconds, unit="of full's"))
    finish(
        "latency",
        rows,
        {"splits": [asdict(s) for s in splits], "requests": [asdict(e) for e in whole]},
        json_file,
        plot,
    )


TRIGGER_BAR, TRIGGERS_BAR, TAIL_BAR, FIXED_BAR, PADDED_BAR = 0.7, 0.04, 2.0, 0.95, 2.0
"""Most milliseconds of a trigger; most of decode time for all triggers; most of the p99 step by the median; least
decode tokens/s by those of `fixed`, and by those of heads that are padded to the longest.
"""


def hardkv(json_file: Json = None, plot: Plot = None) -> None:
    """Time Hard-KV's triggers, alone and beside decode steps; decode heads of their own lengths against padded ones.

    \b
    Examples:
      siftkv bench hardkv
      siftkv bench hardkv --json hardkv.json --plot hardkv.png
    """
    from siftkv.benchmarks import hardkv_gpu as bench
    from siftkv.benchmarks.hardkv_trigger import CONTEXT
    from siftkv.benchmarks.results import Row
    from siftkv.benchmarks.throughput import random_llama
    from siftkv.kernels.cuda.select import METRICS

    found = bench.run_hardkv(random_llama())
    rows: list[Row] = []
    table = plain_table(f"A trigger of one request of {CONTEXT} tokens; milliseconds")
    for name in ("metric", "snapshot", "select", "rewrite", "all"):
        table.add_column(name)
    for t in found.triggers:
        parts = {"snapshot": t.snapshot_ms, "select": t.select_ms, "rewrite": t.rewrite_ms, "all": t.trigger_ms}
        table.add_row(t.metric, *(f"{ms:.3f}" for ms in parts.values()))
        where = f"trigger of {CONTEXT} tokens, {t.metric}"
        for name, ms in parts.items():
            bar = f"<= {TRIGGER_BAR}" if name == "all" and t.metric in METRICS else None
            rows.append(Row(what=f"{where}: {name}", value=ms, unit="ms", bar=bar))
    stdout_console().print(table)
    table = plain_table("Decode steps")
    for name in ("what", "requests", "median ms", "p99 ms", "mean ms", "tokens/s", "of bf16"):
        table.add_column(name)
    for d in (found.loaded, found.idle, *found.own.values(), *found.padded.values(), found.fixed):
        times = (f"{ms:.3f}" for ms in (d.median_ms, d.p99_ms, d.mean_ms))
        table.add_row(d.what, str(d.requests), *times, f"{d.tokens_per_second:.0f}", f"{d.ratio:.3f}")
    stdout_console().print(table)
    where = f"batch {bench.BATCH}, {CONTEXT} context, {bench.KEPT} tokens a head, interval 128"
    tail = found.loaded.p99_ms / found.loaded.median_ms
    rows.append(Row(what=f"triggers: {where}", value=found.share, unit="of decode time", bar=f"<= {TRIGGERS_BAR}"))
    rows.append(Row(what=f"p99 step: {where}", value=tail, unit="x the median", bar=f"<= {TAIL_BAR}"))
    for how, own in found.own.items():
        what = f"decode at {bench.POOL_BYTES >> 30} GiB, heads {how}, {own.ratio:.3f} of bf16"
        for name, other, least in (("fixed", found.fixed, FIXED_BAR), ("padded", found.padded[how], PADDED_BAR)):
            value = own.tokens_per_second / other.tokens_per_second
            rows.append(Row(what=what, value=value, unit=f"x {name}, tokens/s", bar=f">= {least}"))
    finish("hardkv", rows, found.as_dict(), json_file, plot)
