"""`siftkv bench kernels` and `siftkv bench throughput`: speed on a GPU."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli.bench import Json, finish
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

VLLM = {(192, 1024, 1024): {"bf16": 5205.0, "fp8": 7213.0}, (48, 8192, 768): {"bf16": 888.0, "fp8": 1147.0}}
"""Output tokens/s of vLLM 0.26.0 by KV dtype: Llama-3-8B shape, dummy bf16 weights, 12 GiB pool, CUDA graphs on, one
H200. Measured on 2026-11-29 in a run of its own, not beside ours.
"""

QUARTER = 0.25
"""Share of bf16's bytes at which a setting is held to the bars of a quarter."""

_QUARTER_BARS = {"bf16": ">= 2.5", "fp8": ">= 1.8"}


def kernels(json_file: Json = None) -> None:
    """Time decode attention against what the same card reads in the same run.

    \b
    Examples:
      siftkv bench kernels
      siftkv bench kernels --json kernels.json
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
    finish("kernels", rows, [r.as_dict() for r in found], json_file)


def throughput(
    kv: Annotated[
        list[str] | None,
        typer.Option("--kv", help="A setting of the KV cache; repeatable.  [default: full, fixed]", show_default=False),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 192,
    prompt: Annotated[int, typer.Option(help="Prompt tokens a request.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Generated tokens a request.")] = 1024,
    pool_gib: Annotated[float, typer.Option(help="GiB of the KV cache, tables and windows included.")] = 12.0,
    json_file: Json = None,
) -> None:
    """Output tokens/s of a Llama-3-8B-shaped model with random weights, at a fixed KV pool, greedy, CUDA graphs on.

    \b
    Examples:
      siftkv bench throughput
      siftkv bench throughput --kv uniform:k8v4 --requests 48 --prompt 8192 --new-tokens 768
    """
    from siftkv.benchmarks.results import Row
    from siftkv.benchmarks.throughput import Workload, measure, random_llama

    work = Workload(requests, prompt, new_tokens, int(pool_gib * (1 << 30)))
    settings = kv or ["full", f"fixed:high_share=0.1,low_share=0.66,length={prompt + new_tokens}"]
    model = random_llama()
    references = VLLM.get((requests, prompt, new_tokens), {})
    rows: list[Row] = []
    data = []
    for setting in settings:
        say(f"{setting}: {requests} requests of {prompt} + {new_tokens} tokens")
        found = measure(model, setting, work)
        data.append(asdict(found) | asdict(work))
        say(f"{found}")
        where = f"{setting}, {requests} x ({prompt} in, {new_tokens} out)"
        rows.append(Row(what=f"{where}: output", value=found.output_tokens_per_second, unit="tokens/s"))
        rows.append(Row(what=f"{where}: physical bytes at the end", value=found.ratio, unit="of bf16"))
        for dtype, reference in references.items():
            bar = _QUARTER_BARS[dtype] if found.ratio <= QUARTER else None
            if setting == "full" and dtype == "bf16":
                bar = ">= 1.0"
            rows.append(
                Row(
                    what=f"{where}: output",
                    value=found.output_tokens_per_second / reference,
                    unit=f"x vLLM 0.26 {dtype}",
                    bar=bar,
                )
            )
    finish("throughput", rows, data, json_file)
