"""`siftkv inspect`: see which tokens a policy keeps, head by head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli import options
from siftkv.cli.console import Counter, busy, kv_line, open_llm, say, write_text
from siftkv.errors import RequestError, SiftKVError

if TYPE_CHECKING:
    from siftkv.evaluate.inspect import Inspection


def inspect(
    model: Annotated[
        str, typer.Argument(help="A built-in name (see 'siftkv models list'), a folder, a .gguf file or a Hub id.")
    ] = "smollm2-135m",
    kv: options.Kv = "hardkv:lower=256,upper=512",
    prompt: Annotated[str | None, typer.Option(help="The prompt.", show_default=False)] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A text to begin with instead: a .txt or .jsonl file or a shipped story.",
            metavar="TEXT",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of --data that are the prompt.")] = 1024,
    max_tokens: options.MaxTokens = 256,
    every: Annotated[int, typer.Option(help="Tokens between two looks, for policies without triggers.")] = 64,
    heads: Annotated[int, typer.Option(help="Heads in the picture of kept tokens; 0 = one picture a layer.")] = 6,
    out: Annotated[str, typer.Option(help="Folder for maps.png, counts.png and inspect.json.")] = "inspect",
    dtype: options.Dtype = "auto",
) -> None:
    """Run a prompt, and save which tokens each head keeps after every trigger, as pictures and as JSON.

    \b
    Examples:
      siftkv inspect --data a_scandal_in_bohemia
      siftkv inspect ./my-model --kv hardkv:p=0.8,lower=128,upper=256,budget=512 --data report.txt
      siftkv inspect --kv diffkv:alpha_low=0.05 --prompt "Once upon a time" --max-tokens 512
    """
    if (prompt is None) == (data is None):
        raise RequestError("give one prompt: with --prompt TEXT, or with --data a_scandal_in_bohemia")
    if min(prompt_tokens, max_tokens, every) < 1:
        raise RequestError("--prompt-tokens, --max-tokens and --every must be 1 or more")
    folder = _folder(out)
    with busy("Starting"):
        from siftkv import SamplingParams, parse_policy
        from siftkv.benchmarks.texts import leading_tokens, read_text, tokenize
        from siftkv.evaluate.inspect import inspect_request

        policy = parse_policy(kv)
        text = read_text(data) if data is not None else None
    llm = open_llm(model, kv=policy, dtype=dtype, max_num_seqs=1)
    if text is not None:
        ids = [*leading_tokens(llm.tokenizer), *tokenize(llm.tokenizer, text)][:prompt_tokens]
    else:
        ids = llm.encode(prompt or "")
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with Counter("Generating", max_tokens) as counter:
        found = inspect_request(llm, ids, params, every, counter.advance)
    _save(found, folder, heads)


def _folder(out: str) -> Path:
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SiftKVError(f"cannot make the folder {out}: {error.strerror or error}") from error
    return folder


def _save(found: Inspection, folder: Path, heads: int) -> None:
    from siftkv.evaluate.inspect_plots import plot_counts, plot_maps, spread_heads

    write_text(str(folder / "inspect.json"), json.dumps(found.to_dict()) + "\n")
    plot_counts(found, folder / "counts.png")
    if heads > 0:
        plot_maps(found, spread_heads(found, heads), folder / "maps.png")
    else:
        layers, count, _ = found.snapshots[-1].fates.shape
        for layer in range(layers):
            plot_maps(found, [(layer, head) for head in range(count)], folder / f"layer_{layer:02}.png")
    last = found.snapshots[-1]
    share = float(last.kept.float().mean()) / last.seen
    least, most = int(last.kept.min()), int(last.kept.max())
    say(f"{len(found.snapshots)} looks; at the end heads keep {share:.0%} of {last.seen} tokens ({least} to {most})")
    if last.trigger is not None:
        say(f"attention kept {float(last.trigger.coverage.mean()):.1%}, utilisation {last.utilisation:.0%}")
    if found.output.kv is not None:
        say(kv_line(found.output.kv))
    say(f"Written to {folder}")
