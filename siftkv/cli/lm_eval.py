"""`siftkv lm-eval`: lm-evaluation-harness with models whose cache is sifted."""

from __future__ import annotations

import sys

import typer

from siftkv.cli.console import busy
from siftkv.errors import SiftKVError

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}


def lm_eval(context: typer.Context) -> None:
    """Hand over to lm-eval's own command line, with the model type siftkv.

    Everything after 'lm-eval' is lm-eval's; '--model siftkv' is added where no model type is named. Model arguments:
    pretrained, kv (further settings of the policy may follow, separated by commas), dtype, max_model_len, kernels.
    'siftkv lm-eval run --help' shows lm-eval's own options. Needs: pip install 'siftkv[lm-eval]'.

    \b
    Examples:
      siftkv lm-eval --model_args pretrained=smollm2-135m,kv=uniform:k4v4 --tasks arc_easy --limit 50
      siftkv lm-eval --model_args pretrained=./qwen,kv=diffkv:alpha_high=1,alpha_low=0.02 --device cuda --tasks gsm8k
      siftkv lm-eval ls tasks
    """
    with busy("Starting"):
        try:
            from lm_eval.__main__ import cli_evaluate
        except ImportError as error:
            raise SiftKVError("lm-evaluation-harness is not installed: pip install 'siftkv[lm-eval]'") from error
        from siftkv.integrations import lm_eval as _registers  # noqa: F401

    sys.argv = ["lm-eval", *arguments(context.args)]
    cli_evaluate()


def arguments(given: list[str]) -> list[str]:
    """lm-eval's arguments: those given, with `--model siftkv` where a run names no model."""
    run = bool(given) and (given[0] == "run" or given[0].startswith("-"))
    named = any(part in ("--model", "-M") or part.startswith("--model=") for part in given)
    if not run or named or {"-h", "--help"} & set(given):
        return given
    return ["run", "--model", "siftkv", *(given[1:] if given[0] == "run" else given)]
