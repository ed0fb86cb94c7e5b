"""`siftkv bench throughput` and `prompt`: whole requests and whole prompt passes on a GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli.bench import Json, Plot, finish
from siftkv.cli.console import plain_table, say, stdout_console

if TYPE_CHECKING:
    from siftkv.benchmarks.results import Row
    from siftkv.benchmarks.throughput import Throughput, Workload

VLLM = {(192, 1024, 1024): {"bf16": 5205.0, "fp8": 7213.0}, (48, 8192, 768): {"bf16": 888.0, "fp8": 1147.0}}
"""Output tokens/s of vLLM 0.26.0 by KV dtype: Llama-3-8B shape, dummy bf16 weights, 12 GiB pool, CUDA graphs on, one
H200. Measured on 2026-11-29 in a run of its own, not beside ours.
"""

QUARTER = 0.25
"""Share of bf16's bytes at which a setting is held to the bars of a quarter."""

SHORT, LONG, LIGHT = (192, 1024, 1024), (48, 8192, 768), (8, 512, 256)
"""Requests, prompt and output tokens of the workloads that have bars."""

FULL_BAR, QUARTER_BARS, UNIFORM_BAR, DECODE_BAR, LIGHT_BAR = 1.0, {"bf16": 2.5, "fp8": 1.8}, 1.2, 2.5, 0.97
"""Least output by vLLM's in bf16 for `full`; by vLLM's for a quarter of the bytes, short prompts; by vLLM's fp8 for
`uniform:k8v4`, short prompts; least steady decode by `full`'s for a quarter of the bytes, long prompts; least output by
`full`'s for `diffkv` where memory is plenty.
"""


def throughput(
    kv: Annotated[
        list[str] | None,
        typer.Option("--kv", help="A setting of the KV cache; repeatable.  [default: full, fixed]", show_default=False),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 192,
    prompt: Annotated[int, typer.Option(help="Prompt tokens a request.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Generated tokens a request.")] = 1024,
    pool_gib: Annotated[float, typer.Option(help="GiB of the KV cache, tables and windows included.")] = 12.0,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most requests at a time.  [default: all]", show_default=False)
    ] = None,
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Output tokens/s of a Llama-3-8B-shaped model with random weights, at a fixed KV pool, greedy, CUDA graphs on.

    \b
    Examples:
      siftkv bench throughput
      siftkv bench throughput --kv uniform:k8v4 --requests 48 --prompt 8192 --new-tokens 768
    """
    from siftkv.benchmarks.throughput import Workload, measure, random_llama

    work = Workload(requests, prompt, new_tokens, int(pool_gib * (1 << 30)), max_num_seqs or requests)
    settings = kv or ["full", f"fixed:high_share=0.1,low_share=0.62,length={prompt + new_tokens}"]
    model = random_llama()
    found: list[Throughput] = []
    for setting in settings:
        say(f"{setting}: {requests} requests of {prompt} + {new_tokens} tokens")
        found.append(measure(model, setting, work))
        say(f"{found[-1]}")
    full = next((f for f in found if f.kv == "full"), None)
    rows = [row for f in found for row in _throughput_rows(f, full, work)]
    finish("throughput", rows, [asdict(f) | asdict(work) for f in found], json_file, plot)


def _throughput_rows(found: Throughput, full: Throughput | None, work: Workload) -> list[Row]:
    from siftkv.benchmarks.results import Row

    case = (work.requests, work.prompt, work.output)
    quarter = found.ratio <= QUARTER
    where = f"{found.kv}, {work.requests} x ({work.prompt} in, {work.output} out)"
    rows = [
        Row(what=f"{where}: output", value=found.output_tokens_per_second, unit="tokens/s"),
        Row(what=f"{where}: steady decode", value=found.decode_tokens_per_second, unit="tokens/s"),
        Row(what=f"{where}: most requests at a time", value=found.resident, unit="requests"),
        Row(what=f"{where}: physical bytes at the end", value=found.ratio, unit="of bf16"),
        Row(what=f"{where}: preemptions", value=found.preemptions, unit="preemptions"),
    ]
    for dtype, reference in VLLM.get(case, {}).items():
        least = None
        if found.kv == "full" and dtype == "bf16":
            least = FULL_BAR
        elif found.kv == "uniform:k8v4" and dtype == "fp8" and case == SHORT:
            least = UNIFORM_BAR
        elif quarter and case == SHORT:
            least = QUARTER_BARS[dtype]
        value = found.output_tokens_per_second / reference
        rows.append(Row(what=f"{where}: output", value=value, unit=f"x vLLM 0.26 {dtype}", bar=_least(least)))
    if full is not None and found is not full:
        value = found.output_tokens_per_second / full.output_tokens_per_second
        light = LIGHT_BAR if case == LIGHT and found.kv.startswith("diffkv") else None
        rows.append(Row(what=f"{where}: output", value=value, unit="x full", bar=_least(light)))
        value = found.decode_tokens_per_second / full.decode_tokens_per_second
        long = DECODE_BAR if case == LONG and quarter else None
        rows.append(Row(what=f"{where}: steady decode", value=value, unit="x full", bar=_least(long)))
    return rows


def _least(bar: float | None) -> str | None:
    return None if bar is None else f">= {bar}"


SHARE_BARS = {("diffkv", 8192): 0.05, ("diffkv", 32768): 0.08, ("sift", 8192): 0.1, ("sift", 1300): 0.25}
"""Most of a prompt pass that importance, sifting and storing may take, by tokens of the prompt."""

STALL_BAR = 1.1
"""Longest gap between tokens of running requests, by a long prompt's pass and a step."""


def prompt(json_file: Json = None, plot: Plot = None) -> None:
    """Time prompt passes with and without sifting, and how long a long prompt holds up running requests.

    \b
    Examples:
      siftkv bench prompt
      siftkv bench prompt --json prompt.json --plot prompt.png
    """
    from siftkv.benchmarks.prompt import run_prompts
    from siftkv.benchmarks.results import Row

    found, stall = run_prompts()
    table = plain_table("Prompt passes")
    for name in ("prompts", "bare ms", "ms", "sifting"):
        table.add_column(name)
    rows: list[Row] = []
    for r in found:
        where = r.what
        table.add_row(where, f"{r.bare_ms:.1f}", f"{r.ms:.1f}", f"{100 * r.share:.1f} %")
        bar = SHARE_BARS.get((r.kv, r.tokens))
        rows.append(Row(what=f"prompt pass, {where}", value=r.ms, unit="ms"))
        sifting = Row(
            what=f"importance, sifting, storing: {where}",
            value=r.share,
            unit="of the prompt pass",
            bar=None if bar is None else f"<= {bar}",
        )
        rows.append(sifting)
    stdout_console().print(table)
    where = f"{stall.batch} requests under {stall.kv} while {stall.tokens} tokens of prompt come"
    rows.append(Row(what=f"step of {where}", value=stall.step_ms, unit="ms"))
    rows.append(Row(what=f"longest gap of {where}", value=stall.gap_ms, unit="ms"))
    rows.append(
        Row(
            what=f"longest gap of {where}",
            value=stall.beyond,
            unit="x the prompt pass and a step",
            bar=f"<= {STALL_BAR}",
        )
    )
    finish("prompt", rows, [r.as_dict() for r in found] + [asdict(stall)], json_file, plot)
