"""When a command fails: one line for what a user can mend, a clean terminal for Ctrl-C, silence for a closed pipe."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from siftkv.errors import SiftKVError

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
_EXIT_BROKEN_PIPE = 1
_SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """Remembers Ctrl-C: a library whose import is hit by it raises an error of its own instead."""

    seen = False

    @classmethod
    def watch(cls) -> None:
        """From now on Ctrl-C raises KeyboardInterrupt and sets `seen`; whoever carries on after one clears it."""
        signal.signal(signal.SIGINT, cls._raise)

    @classmethod
    def _raise(cls, number: int, frame: object) -> NoReturn:
        cls.seen = True
        raise KeyboardInterrupt


class SiftGroup(TyperGroup):
    """Commands whose `SiftKVError` becomes one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError as error:
            _discard_stdout()
            raise typer.Exit(_EXIT_BROKEN_PIPE) from error
        except (KeyboardInterrupt, Exception) as error:
            if isinstance(error, KeyboardInterrupt) or Interrupts.seen:
                _clean_terminal()
                raise typer.Exit(EXIT_INTERRUPTED) from error
            if isinstance(error, SiftKVError):
                typer.echo(f"error: {' '.join(str(error).split())}", err=True)
                raise typer.Exit(EXIT_ERROR) from error
            raise


def _clean_terminal() -> None:
    """Show the cursor, on a line of its own."""
    if sys.stderr.isatty():
        typer.echo(_SHOW_CURSOR, err=True)


def _discard_stdout() -> None:
    """Send what is still buffered nowhere: the interpreter flushes stdout once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
