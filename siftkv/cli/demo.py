"""`siftkv demo`: what sifting saves and what it costs, on this machine, in two minutes."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli import options
from siftkv.cli.console import Counter, busy, check_writable, fetched, say
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from siftkv import LLM
    from siftkv.cli.demo_run import PolicyResult

MODERATE = "diffkv:alpha_high=3,alpha_low=0.02"
STRONG = "diffkv:high=k4v4,alpha_high=4,alpha_low=0.3"
TEXT = "the_red_headed_league"
TEXT_BEGINS = "I did not gain very much, however, by my inspection."
TEXT_TOKENS = 2048
QUESTION = "What is the name of Mr. Wilson's assistant?"


def demo(
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write a results file.", metavar="FILE", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the two pictures.", metavar="DIR")] = Path("siftkv-demo"),
    kv: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A setting to compare with the full cache; repeatable.  [default: {MODERATE} and {STRONG}]",
            show_default=False,
        ),
    ] = None,
    model: options.Model = "smollm2-135m",
    prompt_tokens: Annotated[int, typer.Option(hidden=True)] = TEXT_TOKENS,
) -> None:
    """Compare the full KV cache with two sifted ones: bytes, speed, fidelity, and an answer from a long text.

    The text is a part of "The Red-Headed League", which ships with the package. The small built-in model can read
    a fact in it; what it answers under each setting is shown as it is.

    \b
    Examples:
      siftkv demo
      siftkv demo --kv uniform:k4v4 --kv diffkv:alpha_low=0.2 --json demo.json
    """
    settings = list(kv or (MODERATE, STRONG))
    check_writable(json_file)
    make_folder(out)
    with busy("Starting"):
        from siftkv import parse_policy
        from siftkv.cli import demo_report

        for setting in settings:
            parse_policy(setting)
    fetched(model)
    begun = time.perf_counter()
    llm, results = run(model, settings, prompt_tokens)
    demo_report.show(results, QUESTION)
    with busy("Drawing"):
        pictures = demo_report.draw(llm, results, out)
    seconds = time.perf_counter() - begun
    for picture in pictures:
        print(f"Picture: {picture}")
    if json_file is not None:
        command = shlex.join(["siftkv", *sys.argv[1:]])
        demo_report.results_file(results, command, seconds, QUESTION).write(json_file)
        print(f"Results: {json_file}")
    say(f"Took {seconds:.0f} s.")


def make_folder(out: Path) -> None:
    """Make the folder for pictures. Raises SiftKVError where that is not possible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SiftKVError(f"cannot write to the folder {out}: {error.strerror or error}") from error


def run(model: str, settings: list[str], text_tokens: int) -> tuple[LLM, list[PolicyResult]]:
    """Load, measure and ask, with progress: the engine, and a result for `full` and each setting."""
    with busy(f"Loading {model}"):
        from siftkv.cli import demo_run
        from siftkv.data import read_text
        from siftkv.models import load_model

        llm, results = demo_run.open_demo(load_model(model), settings, text_tokens)
    story = read_text(TEXT)
    ids = demo_run.text_ids(llm, story[story.index(TEXT_BEGINS) :], text_tokens)
    text = llm.tokenizer.decode(ids)
    steps = min(demo_run.FORCED_TOKENS, len(ids) // 4)
    with Counter(f"Reading {len(ids)} tokens with {len(results)} policies", steps) as counter:
        demo_run.measure_fidelity(llm, results, ids, counter.advance)
    prompt_ids = llm.chat_prompt(
        [{"role": "user", "content": f"{text}\n\nQuestion: {QUESTION}\nAnswer in a few words."}]
    )
    for result in results:
        with Counter(f"Answering with {result.kv}", demo_run.ANSWER_TOKENS) as counter:
            demo_run.ask(llm, result, prompt_ids, counter.advance)
    return llm, results
