"""Every committed figure with a bar, from the results files: `python -m siftkv.benchmarks.tables` rewrites the marked
part of docs/results.md.

Run it in the root of a checkout. A test holds that what is committed is what this prints.
"""

from __future__ import annotations

from pathlib import Path

from siftkv.benchmarks.results import ResultsFile, Row
from siftkv.errors import SiftKVError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
FOLDER, PAGE = Path("benchmarks/results"), Path("docs/results.md")


def render(folder: Path) -> str:
    """Markdown of every results file below `folder`, by path: a heading, where it was measured, and the figures that
    have a bar (all of them where none has). Links are those of a page in docs.
    """
    parts = []
    for path in sorted(folder.rglob("*.json")):
        results = ResultsFile.read(path)
        machine = results.hardware
        held = any(row.bar is not None for row in results.rows)
        where = ", ".join([machine.cpu, f"{machine.cores} cores", *(machine.gpu or [])])
        versions = ", ".join(f"{k} {v}" for k, v in results.versions.items() if k in ("torch", "transformers", "numba"))
        picture = path.with_suffix(".png")
        lines = [
            f"**{results.name}** ({results.date[:10]}; {where}; {versions}; [data](../{path.as_posix()})"
            + (f", [picture](../{picture.as_posix()})" if picture.exists() else "")
            + ")",
            "",
            f"`{results.command}`",
            "",
            "| what | measured | bar | met |",
            "| --- | --- | --- | --- |",
            *(_line(row) for row in results.rows if row.bar is not None or not held),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _line(row: Row) -> str:
    value = f"{row.value:.4g}" if isinstance(row.value, float) else f"{row.value}"
    verdict = "" if row.bar is None else "yes" if row.ok else "**no**"
    return f"| {row.what} | {value} {row.unit} | {row.bar or ''} | {verdict} |"


def rewrite(text: str, folder: Path) -> str:
    """`text` with the part between the markers rendered anew. Raises SiftKVError without markers."""
    if BEGIN not in text or END not in text:
        raise SiftKVError(f"{PAGE} has no {BEGIN} ... {END} to write between")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{render(folder)}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(rewrite(PAGE.read_text(), FOLDER))
