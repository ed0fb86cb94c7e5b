"""`siftkv bench selection` and `siftkv bench drift`: what Hard-KV's metrics select, and what condensation costs."""

from __future__ import annotations

from typing import Annotated

import typer

from siftkv.cli import options
from siftkv.cli.bench import Json, Plot, finish
from siftkv.cli.console import Counter, busy, open_llm, plain_table, stdout_console
from siftkv.data import TEXTS


def selection(
    model: options.Model = "smollm2-135m",
    data: Annotated[
        list[str] | None,
        typer.Option(help=f"A text file or shipped story; repeatable.  [default: {TEXTS[0]}]", show_default=False),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Prompts a text.")] = 1,
    dtype: options.Dtype = "auto",
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Count the tokens that top-p keeps under each metric of Hard-KV, with and without calibration, on real prompts.

    \b
    Examples:
      siftkv bench selection
      siftkv bench selection --data a_scandal_in_bohemia --windows 4 --json selection.json --plot selection.png
    """
    with busy("Starting"):
        from siftkv.benchmarks import selection as bench
        from siftkv.benchmarks.texts import cut_windows, leading_tokens, read_text, tokenize
    llm = open_llm(model, kv=bench.policy(), dtype=dtype, max_num_seqs=1, max_model_len=length + 8)
    prompts = []
    names = data or list(TEXTS[:1])
    for name in names:
        ids = tokenize(llm.tokenizer, read_text(name))
        prompts += cut_windows(ids, leading_tokens(llm.tokenizer), name, length, windows, length)
    with Counter("Reading prompts", len(prompts) * llm.cache.spec.num_layers) as counter:
        found = bench.measure(llm, prompts, counter.advance)
    table = plain_table("Tokens that top-p keeps a row, and attention's own count")
    for column in ("metric", "p", "attention", "own top-p", "ratio", "calibrated"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, by_share in found.items():
        for p, counts in by_share.items():
            s = counts.summary()
            cells = (s["attention_count"], s["metric_count"], s["geometric_ratio"], s["calibrated_count"])
            table.add_row(metric, f"{p}", *(f"{x:.2f}" for x in cells))
    stdout_console().print(table)
    about = {"model": llm.model.name, "length": length, "windows": windows, "texts": names, "queries": bench.QUERIES}
    finish("selection", bench.to_rows(found), bench.to_data(found, about), json_file)
    if plot is not None:
        bench.plot(found, plot, f"{llm.model.name}, prompts of {length} tokens: what top-p of a metric keeps")


def drift(
    model: options.Model = "smollm2-135m",
    data: Annotated[str, typer.Option(help="A text file or shipped story.")] = TEXTS[0],
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that are prefilled.")] = 192,
    triggers: Annotated[int, typer.Option(min=1, help="Triggers after the prompt.")] = 50,
    interval: Annotated[int, typer.Option(help="Positions between triggers.")] = 8,
    budget: Annotated[int, typer.Option(help="Tokens that a head holds after a trigger.")] = 128,
    dtype: options.Dtype = "auto",
    json_file: Json = None,
    plot: Plot = None,
) -> None:
    """Feed a text to a full cache and to two of a fixed budget, one that evicts and one that merges, and compare the
    log-sum-exp of their heads' logits and their next-token distributions.

    \b
    Examples:
      siftkv bench drift
      siftkv bench drift --triggers 20 --budget 256 --json drift.json --plot drift.png
    """
    with busy("Starting"):
        from siftkv.benchmarks import drift as bench
        from siftkv.benchmarks.texts import cut_windows, leading_tokens, read_text, tokenize

        kinds = bench.policies(budget, interval)
    length = prompt + triggers * interval + 1
    llm = open_llm(model, kv=kinds[-1], dtype=dtype, max_num_seqs=3, max_model_len=length + 8)
    [ids] = cut_windows(
        tokenize(llm.tokenizer, read_text(data)), leading_tokens(llm.tokenizer), data, length, 1, length
    )
    with Counter("Feeding tokens", length - prompt) as counter:
        found = bench.measure(llm, ids, prompt, kinds, counter.advance)
    rows = bench.to_rows(found)
    table = plain_table(f"After {budget} tokens a head, {triggers} triggers of {interval} tokens")
    for column in ("what", "value"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        table.add_row(row.what, f"{row.value:.4g} {row.unit}")
    stdout_console().print(table)
    about = {"model": llm.model.name, "text": data, "prompt": prompt, "interval": interval, "budget": budget}
    finish("drift", rows, bench.to_data(found, about), json_file)
    if plot is not None:
        bench.plot(found, plot, f"{llm.model.name}: {budget} tokens a head, a trigger every {interval} tokens")
