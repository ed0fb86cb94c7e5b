"""`siftkv models`: the models that can be named without a path."""

from __future__ import annotations

from typing import Annotated

import typer

from siftkv.cli.console import busy, plain_table, size, stdout_console

app = typer.Typer(no_args_is_help=True, help="List, fetch and find built-in models.")

Name = Annotated[str, typer.Argument(help="A built-in model.", show_default=False)]


@app.command("list")
def list_() -> None:
    """List built-in models.

    \b
    Example:
      siftkv models list
    """
    with busy("Starting"):
        from siftkv.models import list_models
    table = plain_table()
    for name in ("name", "what it is", "licence", "download", "fetched"):
        table.add_column(name, justify="right" if name == "download" else "left")
    for model in list_models():
        table.add_row(
            model.name, model.description, model.licence, size(model.download_bytes), "yes" if model.fetched else "no"
        )
    stdout_console().print(table)


@app.command()
def pull(name: Name) -> None:
    """Fetch a built-in model now, and print its folder.

    \b
    Example:
      siftkv models pull smollm2-135m
    """
    with busy("Starting"):
        from siftkv import models
    print(models.pull(name))


@app.command()
def path(name: Name) -> None:
    """Print the folder of a built-in model, whether or not it has been fetched.

    \b
    Example:
      ls "$(siftkv models path smollm2-135m)"
    """
    with busy("Starting"):
        from siftkv.models import model_path
    print(model_path(name))
