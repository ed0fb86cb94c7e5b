"""`siftkv generate`: text from a prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siftkv.cli import options
from siftkv.cli.console import Counter, busy, check_writable, kv_line, open_llm, say, write_text
from siftkv.defaults import DEFAULT_KV
from siftkv.errors import RequestError

if TYPE_CHECKING:
    from siftkv import LLM, CompletionOutput, SamplingParams


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' reads it from stdin.", show_default=False)
    ] = None,
    model: options.Model = "smollm2-135m",
    kv: options.Kv = DEFAULT_KV,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="Read the prompt from a file; '-' is stdin.", show_default=False)
    ] = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    n: Annotated[int, typer.Option(help="Completions of the prompt.")] = 1,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw", help="Send the prompt as a user's message in the model's chat template, or as it is."
        ),
    ] = False,
    stream: Annotated[bool, typer.Option(help="Print text as it comes (one completion only).")] = True,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json",
            help="Write outputs and KV reports to a file; '-' is stdout, instead of the text.",
            show_default=False,
        ),
    ] = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    conditioning: options.Conditioning = "full",
) -> None:
    """Generate text from a prompt and say what its KV cache cost.

    The text goes to stdout, everything else to stderr.

    \b
    Examples:
      siftkv generate "The capital of France is" --max-tokens 32
      siftkv generate --chat "Explain what a KV cache is." --kv diffkv:alpha_low=0.05
      siftkv generate --file report.txt --kv uniform:k4v4 --json out.json
      git log -5 | siftkv generate - --temperature 0.8 --seed 1 --n 2
    """
    check_writable(json_file)
    text = read_prompt(prompt, file)
    asked = options.SamplingOptions(
        max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, tuple(stop or ()), n
    )
    with busy("Starting"):
        from siftkv import parse_policy

        asked.check()
        policy = parse_policy(kv)
    about = {"device": device, "dtype": dtype, "max_model_len": max_model_len, "conditioning": conditioning}
    llm = open_llm(model, kv=policy, max_num_seqs=n, **about)
    prompt_ids = llm.chat_prompt([{"role": "user", "content": text}]) if chat else llm.encode(text)
    live = stream and n == 1 and json_file != "-"
    outputs = _run(llm, prompt_ids, asked.params(llm.model.generation), live)
    if json_file != "-" and not live:
        _print_all(outputs)
    for output in outputs:
        if output.kv is not None:
            say(kv_line(output.kv))
    if json_file is not None:
        write_text(json_file, json.dumps(_record(llm, text, prompt_ids, outputs), indent=2) + "\n")


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from the argument, a file or stdin. Raises RequestError for none, two, an unreadable or empty one."""
    if (prompt is None) == (file is None):
        raise RequestError("give one prompt: as an argument, with --file FILE, or '-' for stdin")
    text = sys.stdin.read() if "-" in (prompt, file) else _read_file(file) if file is not None else prompt
    if not text:
        raise RequestError("the prompt is empty: give some text")
    return text


def _read_file(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"cannot read {file}: it is not UTF-8 text") from error


def _run(llm: LLM, prompt_ids: list[int], params: SamplingParams, live: bool) -> list[CompletionOutput]:
    """Generate, printing as it comes or with a bar; completions by index."""
    chunks = llm.stream(prompt_ids, params)
    done: list[CompletionOutput] = []
    with busy(f"Reading {len(prompt_ids)} prompt tokens"):
        first = next(chunks)
    if live:
        for chunk in chain([first], chunks):
            print(chunk.text, end="", flush=True)
            done += [chunk.output] if chunk.output else []
        print()
        return done
    with Counter("Generating", params.n * (params.max_tokens or 0)) as counter:
        for chunk in chain([first], chunks):
            counter.advance(len(chunk.token_ids))
            done += [chunk.output] if chunk.output else []
    return sorted(done, key=lambda output: output.index)


def _print_all(outputs: list[CompletionOutput]) -> None:
    for output in outputs:
        if len(outputs) > 1:
            print(f"--- {output.index + 1} of {len(outputs)} ---")
        print(output.text)


def _record(llm: LLM, text: str, prompt_ids: list[int], outputs: list[CompletionOutput]) -> dict[str, Any]:
    """Everything about a run, made of JSON types only."""
    return {
        "model": llm.model.name,
        "kv": llm.kv.describe(),
        "prompt": text,
        "prompt_token_ids": prompt_ids,
        "outputs": [asdict(output) | {"kv": output.kv.to_dict() if output.kv else None} for output in outputs],
    }
