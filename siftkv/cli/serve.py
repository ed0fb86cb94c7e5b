"""`siftkv serve`: an OpenAI-compatible server."""

from __future__ import annotations

import re
import ssl
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siftkv.cli import options
from siftkv.cli.console import busy, fetched, say
from siftkv.defaults import DEFAULT_KV
from siftkv.errors import SiftKVError

if TYPE_CHECKING:
    from siftkv import LLM

_HTTP = "HTTP"
_ENGINE = "Engine"
LoadFormat = Annotated[
    str,
    typer.Option(
        help="auto, or dummy: random weights of the shape in a folder's config.json, to measure speed.",
        rich_help_panel=_ENGINE,
    ),
]
_LEVELS = ("debug", "info", "warning", "error")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def serve(
    model: Annotated[str, typer.Argument(help="A built-in name, a folder, a .gguf file or a Hub id.")] = "smollm2-135m",
    kv: options.Kv = DEFAULT_KV,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 = all.", rich_help_panel=_HTTP)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 = a free one.", rich_help_panel=_HTTP)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Clients must send it as a Bearer token; may be given several times.",
            envvar="SIFTKV_API_KEY",
            show_default=False,
            rich_help_panel=_HTTP,
        ),
    ] = None,
    allow_kv: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy that requests may name: 'diffkv' with any settings, 'uniform:k8v4' with those; may be "
            "given several times.  [default: every one that fits the pool]",
            show_default=False,
            rich_help_panel=_HTTP,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model in the API; may be given several times.  [default: the model's]",
            show_default=False,
            rich_help_panel=_HTTP,
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Completions that may wait; more get 429.", rich_help_panel=_HTTP)
    ] = 1024,
    max_body_bytes: Annotated[str, typer.Option(help="Largest request body.", rich_help_panel=_HTTP)] = "8MiB",
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A web page's origin that may call the server; '*' = all; may be given several times.",
            show_default=False,
            rich_help_panel=_HTTP,
        ),
    ] = None,
    ssl_keyfile: Annotated[
        str | None, typer.Option(help="TLS: the key, a PEM file.", show_default=False, rich_help_panel=_HTTP)
    ] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(help="TLS: the certificate, a PEM file.", show_default=False, rich_help_panel=_HTTP)
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="What running requests get to finish after SIGTERM.", rich_help_panel=_HTTP)
    ] = 30.0,
    log_prompts: Annotated[bool, typer.Option(help="Write prompts to the log.", rich_help_panel=_HTTP)] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_HTTP)] = "info",
    dtype: options.Dtype = "auto",
    load_format: LoadFormat = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)] = "cpu",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Completions that run at a time.", rich_help_panel=_ENGINE)] = 16,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Prompt tokens of one pass.", rich_help_panel=_ENGINE)
    ] = 8192,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the whole KV cache: 12GiB, 800MB.  [default: on a GPU what --gpu-memory-utilization leaves, "
            "on a CPU 1GiB, or what one longest request takes]",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            help="Share of a GPU's memory that weights, passes and cache take together.", rich_help_panel=_ENGINE
        ),
    ] = 0.9,
    conditioning: options.Conditioning = "full",
    kernels: Annotated[str, typer.Option(help="auto, numba, cuda or reference.", rich_help_panel=_ENGINE)] = "auto",
    preemption: Annotated[
        str, typer.Option(help="swap or recompute what gives its pages up.", rich_help_panel=_ENGINE)
    ] = "swap",
    swap_space: Annotated[str, typer.Option(help="Host memory for swapping.", rich_help_panel=_ENGINE)] = "4GiB",
    max_window: Annotated[
        int | None,
        typer.Option(
            help="Largest window that requests may ask for.  [default: that of --kv, at least 64]",
            show_default=False,
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    enforce_eager: Annotated[
        bool, typer.Option(help="On a GPU, decode without CUDA graphs.", rich_help_panel=_ENGINE)
    ] = False,
    check_integrity: Annotated[
        bool, typer.Option(help="Verify the cache's bookkeeping after every step (slow).", rich_help_panel=_ENGINE)
    ] = False,
) -> None:
    """Serve a model through OpenAI's HTTP API, with a dashboard at / and Prometheus metrics at /metrics.

    Logs go to stderr, one JSON object a line. SIGTERM lets running requests finish.

    \b
    Examples:
      siftkv serve smollm2-135m --kv diffkv:alpha_low=0.02
      siftkv serve ./my-model --host 0.0.0.0 --api-key secret --allow-kv full --allow-kv diffkv
      siftkv serve smollm2-135m --kv-cache-memory 2GiB --max-num-seqs 64 --max-queue 256
      siftkv serve ./folder-with-config-json --load-format dummy --device cuda
    """
    http = {
        "model_names": tuple(served_model_name or ()),
        "api_keys": tuple(key for key in api_key or () if key),
        "max_body_bytes": parse_size("--max-body-bytes", max_body_bytes),
        "cors_origins": tuple(cors_origin or ()),
        "allow_kv": tuple(allow_kv or ()),
        "log_prompts": log_prompts,
        "drain_seconds": drain_seconds,
    }
    engine = {
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "kv_cache_memory_bytes": kv_cache_memory and parse_size("--kv-cache-memory", kv_cache_memory),
        "gpu_memory_utilization": gpu_memory_utilization,
        "conditioning": conditioning,
        "kernels": kernels,
        "preemption": preemption,
        "swap_space_bytes": parse_size("--swap-space", swap_space),
        "max_window": max_window,
        "enforce_eager": enforce_eager,
        "check_integrity": check_integrity,
    }
    _check_tls(ssl_keyfile, ssl_certfile)
    if log_level not in _LEVELS:
        raise SiftKVError(f"unknown --log-level {log_level!r}: choose {', '.join(_LEVELS)}")
    check_load_format(load_format)
    _run(model, kv, max_queue, log_level, load_format, (host, port, ssl_keyfile, ssl_certfile), http, engine)


def check_load_format(name: str) -> None:
    """Raise SiftKVError for one that is not known."""
    if name not in ("auto", "dummy"):
        raise SiftKVError(f"unknown --load-format {name!r}: choose auto or dummy")


def _check_tls(keyfile: str | None, certfile: str | None) -> None:
    if keyfile is None and certfile is None:
        return
    if keyfile is None or certfile is None:
        raise SiftKVError("TLS needs both --ssl-keyfile and --ssl-certfile")
    for file in (keyfile, certfile):
        if not Path(file).is_file():
            raise SiftKVError(f"there is no file {file}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except (OSError, ValueError) as error:
        raise SiftKVError(
            f"{keyfile} and {certfile} are no key and certificate that belong together: {error}"
        ) from error


def _run(
    model: str,
    kv: str,
    max_queue: int,
    log_level: str,
    load_format: str,
    place: tuple[str, int, str | None, str | None],
    http: dict[str, Any],
    engine: dict[str, Any],
) -> None:
    """Take the port, then load the model behind it and serve until a signal comes."""
    with busy("Starting"):
        from siftkv import parse_policy
        from siftkv.server import logs, run
        from siftkv.server.settings import AllowedKv, ServerSettings
        from siftkv.server.worker import EngineWorker

    policy, settings, address = parse_policy(kv), ServerSettings(**http), run.Address(*place)
    formats = AllowedKv(settings.allow_kv).formats()
    bound = run.listen(address)
    address = replace(address, port=bound.getsockname()[1])
    logs.configure(log_level)

    def load() -> LLM:
        from siftkv import LLM
        from siftkv.models import dummy_model

        if load_format == "dummy":
            found = dummy_model(model, engine["dtype"], engine["device"])
            llm = LLM(found, policy, formats=formats, **engine)
        else:
            fetched(model)
            llm = LLM(model, policy, formats=formats, **engine)
        run.warm_up(llm)
        return llm

    say(f"loading {model}")
    worker = EngineWorker(load, max_queue)
    run.serve(worker, settings, address, bound, lambda: say(f"serving {model} at {address.url}"))


def parse_size(option: str, text: str) -> int:
    """Bytes of `12GiB`, `800MB` or `4096`. Raises SiftKVError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise SiftKVError(f"{option} {text!r} is no size: write bytes, or 12GiB, 800MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
