"""`siftkv analyze`: why sifting works, or does not, on the user's own model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli import options
from siftkv.cli.console import Counter, busy, say, stdout_console
from siftkv.cli.evaluate import Device, about_model, finish, load, version
from siftkv.data import TEXTS
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from siftkv.models import LoadedModel


def analyze(
    model: options.Model = "smollm2-135m",
    kv: options.Kv = "diffkv",
    data: Annotated[
        list[str] | None,
        typer.Option(help="A text (.txt or .jsonl); repeatable.  [default: both shipped stories]", show_default=False),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    forced: Annotated[int, typer.Option(help="Tokens that are fed when keys and values are compared.")] = 128,
    out: Annotated[str, typer.Option(help="Folder of report, figures and pictures.")] = "siftkv-eval/analysis",
    device: Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    """Show DiffKV's evidence on a model: scores, critical tokens, sparsity by head, keys against values, tiers.

    Prompts are the first tokens of each text, a list of words, and a request for JSON.

    \b
    Examples:
      siftkv analyze
      siftkv analyze --model ./qwen --device cuda --prompt 4096 --data my.txt --kv diffkv:alpha_low=0.05
    """
    with busy("Starting"):
        from siftkv.benchmarks.fidelity import Protocol, windows_of
        from siftkv.benchmarks.texts import read_text
        from siftkv.evaluate.analysis import plots, run
        from siftkv.evaluate.report import RECORDS, Report
        from siftkv.evaluate.resume import Records, fingerprint
        from siftkv.policies import parse_policy

        parse_policy(kv)
        protocol = Protocol(prompt, forced, 1)
        texts = [read_text(source) for source in data or TEXTS]
    loaded = load(model, dtype, device)
    windows = windows_of(loaded, texts, protocol)
    prompts = {w.text: w.ids[:prompt] for w in windows} | _made(loaded, " ".join(t.text for t in texts), prompt)
    records = Records(
        Path(out) / RECORDS, {"model": fingerprint(loaded), "prompt": prompt, "forced": forced} | version()
    )
    with Counter("Measuring", len(prompts) + forced * len(run.PRECISIONS)) as counter:
        found = run.analyse(loaded, prompts, windows[0], protocol, kv, records, progress=counter.advance)
    title = f"{loaded.name}, prompts of {prompt} tokens"
    plots.draw(found, out, title)
    sections = plots.analysis_sections(found)
    for heading, text in sections.items():
        stdout_console().print(f"{heading}\n{text}\n", markup=False, soft_wrap=True)
    about = about_model(loaded) | found.to_dict()
    finish(Report("analysis", f"Analysis of {title}", plots.analysis_rows(found), about, sections, plots.PICTURES), out)


def _made(model: LoadedModel, text: str, length: int) -> dict[str, list[int]]:
    """Prompts of other kinds than prose: a list of words, where the length allows it, and a request for JSON."""
    import random

    from siftkv.evaluate.retrieval.items import Haystack, tokens_of
    from siftkv.evaluate.retrieval.words import common_words
    from siftkv.evaluate.tasks.run import TASKS

    [probe] = TASKS["strict_json"].problems(None, 1, 0)
    tokenizer = model.tokenizer
    found = {"request for JSON": list(tokenizer(probe.message, verbose=False)["input_ids"])[:length]}
    try:
        item = common_words(Haystack(text, tokenizer), random.Random(0), length, 0)
    except SiftKVError as error:
        say(f"note: no list of words: {error}")
        return found
    context, question = tokens_of(item, tokenizer)
    return {"list of words": (context + question)[:length]} | found
