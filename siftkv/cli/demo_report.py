"""What the demo shows and writes of what it measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siftkv import LLM, KVReport
from siftkv.benchmarks.results import ResultsFile, Row
from siftkv.cli.console import plain_table, size, stdout_console, tier_shares
from siftkv.cli.demo_run import PolicyResult
from siftkv.evaluate.plots import pick_heads, plot_fates, plot_kept

TIME_BAR = "<= 120"
"""Seconds that the demo may take on two cores, once the model is fetched."""


def show(results: Sequence[PolicyResult], question: str) -> None:
    """Print the table, the question and the answers."""
    console = stdout_console()
    table = plain_table(f"KV cache after {_report(results[0]).tokens_seen} tokens of text")
    table.add_column("")
    for result in results:
        table.add_column(result.kv.replace(",", ",\n").replace(":", ":\n"), justify="right")
    columns = [_cells(result, _tiers(results)) for result in results]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console.print(table)
    positions = next((r.divergence.positions for r in results if r.divergence), 0)
    console.print(
        f"KL, top-1 agreement and perplexity: the last {positions} tokens of the text, fed one by one through the "
        "decode path, against the full cache. Bytes are what memory holds: padding, tables and window included.",
        style="dim",
    )
    console.print(f"\nQuestion after the text: {question}", style="bold", markup=False)
    for result in results:
        console.print(f"  {result.kv}\n    {result.answer or '(nothing)'}", markup=False)
    console.print()


def _report(result: PolicyResult) -> KVReport:
    assert result.text_report is not None
    return result.text_report


def _tiers(results: Sequence[PolicyResult]) -> list[str]:
    """Tiers that hold anything under any policy, in the pool's order."""
    used = {tier for result in results for tier in tier_shares(_report(result))}
    return [tier for tier in _report(results[0]).tokens_by_tier if tier in used]


def _cells(result: PolicyResult, tiers: Sequence[str]) -> dict[str, str]:
    report, divergence = _report(result), result.divergence
    shares = tier_shares(report)
    cells = {
        "physical bytes, peak": size(report.peak_bytes),
        "of bf16's bytes": f"{report.ratio:.1%}",
        "bytes a token kept in a head": f"{report.bytes_per_live_token:.0f}",
        **{
            f"tokens in {tier}" if tier != "dropped" else "tokens dropped": _percent(shares.get(tier)) for tier in tiers
        },
        "decode, tokens/s": f"{result.decode_tokens_per_s:.1f}",
    }
    fidelity = ("mean KL, nats/token", "mean KL, worst tenth", "top-1 agreement", "perplexity, of full's")
    if divergence is None:
        return cells | dict.fromkeys(fidelity, "-")
    values = (
        f"{divergence.mean_kl:.4f}",
        f"{divergence.worst_decile_kl:.4f}",
        f"{divergence.top1_agreement:.1%}",
        f"{divergence.perplexity_ratio:.3f}",
    )
    return cells | dict(zip(fidelity, values, strict=True))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def draw(llm: LLM, results: Sequence[PolicyResult], folder: Path) -> list[Path]:
    """Draw what the caches of the question keep into `folder`; the pictures' paths. Raises SiftKVError on failure."""
    sifted = [r for r in results[1:] if r.answer_report is not None]
    kept, fates = folder / "kept_tokens.png", folder / "token_fates.png"
    tokens = _report_of_answer(sifted[0]).tokens_seen
    plot_kept(
        {r.kv: _report_of_answer(r) for r in sifted},
        kept,
        f"Tokens that each head of {llm.model.name} keeps, of {tokens} (text, question and answer)",
    )
    last = sifted[-1]
    heads = pick_heads(_report_of_answer(last))
    plot_fates(
        {head: last.fates[head] for head in heads},
        [tier.name for tier in llm.cache.spec.tiers],
        fates,
        f"Where each token went under {last.kv}, in {len(heads)} heads from the one that keeps most to the least",
    )
    return [kept, fates]


def _report_of_answer(result: PolicyResult) -> KVReport:
    assert result.answer_report is not None
    return result.answer_report


def results_file(results: Sequence[PolicyResult], command: str, seconds: float, question: str) -> ResultsFile:
    """The results file of a demo run."""
    rows = [row for result in results for row in _rows(result)]
    rows.append(Row(what="whole demo, model already fetched", value=round(seconds, 1), unit="s", bar=TIME_BAR))
    data = {"question": question, "policies": [_data(result) for result in results]}
    return ResultsFile(name="demo", command=command, rows=rows, data=data)


def _rows(result: PolicyResult) -> list[Row]:
    report, divergence = _report(result), result.divergence
    figures: list[tuple[str, float, str]] = [
        ("physical KV bytes, peak", report.peak_bytes, "bytes"),
        ("physical KV bytes", report.ratio, "of bf16"),
        ("physical bytes a token kept in a head", report.bytes_per_live_token, "bytes"),
        ("decode", result.decode_tokens_per_s, "tokens/s"),
    ]
    if divergence is not None:
        figures += [
            ("mean KL", divergence.mean_kl, "nats/token"),
            ("top-1 agreement", divergence.top1_agreement, "share"),
            ("perplexity", divergence.perplexity_ratio, "of full's"),
        ]
    return [Row(what=f"{result.kv}: {what}", value=value, unit=unit) for what, value, unit in figures]


def _data(result: PolicyResult) -> dict[str, Any]:
    return {
        "kv": result.kv,
        "policy": result.policy.describe(),
        "answer": result.answer,
        "prompt_s": result.prompt_s,
        "text_report": _report(result).to_dict(),
        "answer_report": _report_of_answer(result).to_dict(),
        "divergence": result.divergence.to_dict() if result.divergence else None,
    }
