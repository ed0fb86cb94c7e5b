"""`siftkv bench serve-overhead`: what HTTP costs a saturated engine."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli import options
from siftkv.cli.bench import Json, finish
from siftkv.cli.console import busy, check_writable, fetched, say
from siftkv.cli.serve import LoadFormat, check_load_format, parse_size
from siftkv.defaults import DEFAULT_KV
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from siftkv.models import LoadedModel


def overhead(
    model: options.Model = "smollm2-135m",
    kv: options.Kv = DEFAULT_KV,
    load_format: LoadFormat = "auto",
    dtype: options.Dtype = "auto",
    device: options.Device = "cpu",
    requests: Annotated[int, typer.Option(min=1, help="Requests, all at once.")] = 64,
    prompt_length: Annotated[int, typer.Option(min=1, help="Random token ids in a prompt.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of every answer.")] = 128,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Completions that run at a time.")] = 64,
    kv_cache_memory: Annotated[str, typer.Option(help="Bytes of the whole KV cache: 12GiB, 800MB.")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each way; medians are told.")] = 3,
    processes: Annotated[int, typer.Option(min=1, help="Processes that send the requests.")] = 2,
    client_cores: Annotated[
        str | None, typer.Option(help="CPUs of these processes, such as 2,3; Linux only.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    json_file: Json = None,
) -> None:
    """Time the same requests through LLM.generate and through the server, streamed and whole, turn by turn.

    \b
    Examples:
      siftkv bench serve-overhead
      taskset -c 0,1 siftkv bench serve-overhead --client-cores 2,3
      siftkv bench serve-overhead -m ./folder --load-format dummy --device cuda --requests 192 --max-num-seqs 192
    """
    check_load_format(load_format)
    check_writable(json_file)
    cores, pool = _cores(client_cores), parse_size("--kv-cache-memory", kv_cache_memory)
    with busy("Starting"):
        from siftkv import LLM
        from siftkv.benchmarks import serve_overhead as bench
        from siftkv.benchmarks.serve_fleet import Fleet
        from siftkv.benchmarks.serve_prompts import random_id_prompts
        from siftkv.server.run import warm_up

    fleet = Fleet(processes, cores)
    with busy("Loading"):
        loaded = _loaded(model, load_format, dtype, device)
        longest = prompt_length + max_tokens + 1
        llm = LLM(loaded, kv, max_num_seqs=max_num_seqs, max_model_len=longest, kv_cache_memory_bytes=pool)
        warm_up(llm)
    works = random_id_prompts(requests, prompt_length, loaded.config.vocab_size, max_tokens, random.Random(seed))
    found = bench.measure(llm, works, fleet, rounds, say)
    about = {"model": loaded.name, "kv": kv, "device": device, "requests": requests, "prompt": prompt_length}
    about |= {"max_tokens": max_tokens, "max_num_seqs": max_num_seqs, "kv_cache_memory_bytes": pool}
    about |= {"processes": processes, "client_cores": list(cores), "seed": seed}
    label = f"{loaded.name}, {kv}, {requests} x ({prompt_length} in, {max_tokens} out)"
    finish("serve_overhead", bench.rows(found, label), bench.to_data(found, label, about), json_file)


def _loaded(model: str, load_format: str, dtype: str, device: str) -> LoadedModel:
    from siftkv.models import dummy_model, load_model

    if load_format == "dummy":
        return dummy_model(model, dtype, device)
    fetched(model)
    return load_model(model, dtype, device)


def _cores(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise SiftKVError(f"--client-cores {text}: give numbers of CPUs such as 2,3") from error
