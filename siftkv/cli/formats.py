"""`siftkv formats`: what each storage format takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from siftkv.cli.console import busy, fetched, plain_table, stdout_console
from siftkv.errors import FormatError

if TYPE_CHECKING:
    from siftkv.formats import PageLayout

DEFAULT_HEAD_DIM = 128
EXAMPLES = ("fp8", "k8v4c", "k4v4c", "k4v2c", "k4v4_g22", "k4v2_g24", "k4v2_g24c")
"""Formats shown besides the known ones: compact value metadata (`c`) and several scales a token (`_g`)."""

_FIRST = ("format", "bits\nk/v", "state\nB", "token\nB")
_ALONE = ("page\nB", "tokens\na page", "waste", "of\nbf16")
_POOLED = ("tokens\na page*", "waste*", "of\nbf16*")
COLUMNS = (*_FIRST, *_ALONE, *_POOLED)


def formats(
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Take head_dim from this model.", show_default=False)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Channels of a head.  [default: 128]", show_default=False)
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
) -> None:
    """Show what a token takes in each storage format, scales, scores, positions and the unused ends of pages included.

    \b
    Examples:
      siftkv formats
      siftkv formats --model smollm2-135m
      siftkv formats --head-dim 64 --markdown
    """
    if model is not None and head_dim is not None:
        raise FormatError("give --model or --head-dim, not both")
    dim = DEFAULT_HEAD_DIM if head_dim is None else head_dim
    if model is not None:
        dim = _head_dim(model)
    with busy("Starting"):
        rows = [row.cells() for row in format_rows(dim)]
    if markdown:
        print(markdown_table(dim))
        return
    table = plain_table(f"One token in one kv head of {dim} channels", gap=1)
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = stdout_console()
    console.print(table)
    console.print(legend(dim))


def _head_dim(model: str) -> int:
    """head_dim of a model; the weights of a folder are not read for it."""
    with busy("Starting"):
        from siftkv.models import ModelConfig, load_model
        from siftkv.models.checkpoint import read_config
    folder = fetched(model)
    if folder.is_dir():
        return ModelConfig.from_hf(read_config(folder)).head_dim
    with busy(f"Reading {model}"):
        return load_model(model).config.head_dim


@dataclass(frozen=True)
class FormatRow:
    """A format in a page chosen for it alone, and in the page of the `diffkv` pool (None where that holds no token)."""

    alone: PageLayout
    pooled: PageLayout | None

    def cells(self) -> list[str]:
        """Text of the columns in `COLUMNS`."""
        fmt, alone = self.alone.format, self.alone
        first = [fmt.name, f"{fmt.key_bits}/{fmt.value_bits}", str(alone.state_bytes), str(alone.token_bytes)]
        pooled = _page_cells(self.pooled) if self.pooled else ["-"] * len(_POOLED)
        return [*first, str(alone.page_bytes), *_page_cells(alone), *pooled]


def _page_cells(layout: PageLayout) -> list[str]:
    ratio = layout.bytes_per_token / _bf16_bytes(layout.head_dim)
    return [str(layout.tokens), f"{layout.waste:.1%}", f"{ratio:.1%}"]


def _bf16_bytes(head_dim: int) -> int:
    from siftkv.formats import PageLayout, Tier, TierFormat

    return PageLayout(Tier(TierFormat.parse("bf16"), scores=False, positions=False), head_dim, 1 << 20).token_bytes


def format_rows(head_dim: int) -> list[FormatRow]:
    """Every known format and some examples for a head_dim. Raises FormatError for a head_dim that no page can hold."""
    from siftkv.cache.page_size import choose_page_bytes
    from siftkv.formats import KNOWN_FORMATS, TOKEN_QUANTUM, PageLayout, Tier, TierFormat

    if head_dim < 8 or head_dim % 8:
        raise FormatError(f"head_dim {head_dim}: use a multiple of 8, 8 or more")
    pool = _pool_page_bytes(head_dim)
    rows = []
    for name in (*KNOWN_FORMATS, *EXAMPLES):
        fmt = TierFormat.parse(name)
        tier = Tier(fmt, scores=not fmt.dense, positions=not fmt.dense)
        alone = PageLayout(tier, head_dim, choose_page_bytes((tier,), head_dim))
        fits = pool >= alone.token_bytes * (1 if fmt.dense else TOKEN_QUANTUM)
        rows.append(FormatRow(alone, PageLayout(tier, head_dim, pool) if fits else None))
    return rows


def _pool_page_bytes(head_dim: int) -> int:
    from siftkv.cache.page_size import choose_page_bytes
    from siftkv.policies import DiffKV

    return choose_page_bytes(DiffKV().tiers("bf16"), head_dim)


def legend(head_dim: int) -> str:
    """What the columns mean."""
    from siftkv.policies import DiffKV

    high, low = (tier.name for tier in DiffKV().tiers("bf16"))
    return (
        "state: scales, zero-points, score and position of a token. token: its codes and state. "
        f"of bf16: physical bytes a token, waste included, by the {_bf16_bytes(head_dim)} of plain bf16. "
        "page: the size that suits this format alone. waste: the unused end of a full page. "
        f"*: in the {_pool_page_bytes(head_dim)}-byte page of the default diffkv pool ({high} and {low})."
    )


def markdown_table(head_dim: int) -> str:
    """The table and its legend as Markdown."""
    names = [name.replace("\n", " ").replace("*", "\\*") for name in COLUMNS]
    lines = [
        f"One token in one kv head of {head_dim} channels:",
        "",
        "| " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * (len(names) - 1),
    ]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in format_rows(head_dim)]
    return "\n".join([*lines, "", legend(head_dim).replace("*", "\\*")])
