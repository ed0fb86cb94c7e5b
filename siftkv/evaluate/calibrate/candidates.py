"""Candidates measured side by side against the full cache, each window's prompt run once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from siftkv.benchmarks.fidelity import Protocol, Window
from siftkv.benchmarks.opening import open_for
from siftkv.cache import dense_name
from siftkv.engine.engine import Engine
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.engine.outputs import KVReport
from siftkv.evaluate.divergence import DivergenceMeter, Positions
from siftkv.models import LoadedModel
from siftkv.policies import Full, Policy
from siftkv.policies.profile_file import Figures

Measure = Callable[[Sequence[Policy]], list[Figures]]
"""Figures of candidates, in order."""


def pools(model: LoadedModel, policies: Sequence[Policy]) -> list[list[int]]:
    """Which policies may share a cache: those that need the same one, so that each is charged what it really takes."""
    dense = dense_name(model.decoder.dtype)
    found: dict[object, list[int]] = {}
    for index, policy in enumerate(policies):
        needs = policy.tiers(dense), policy.window, policy.sinks, policy.query_rows, policy.skips
        found.setdefault(needs, []).append(index)
    return list(found.values())


def measure(
    model: LoadedModel,
    policies: Sequence[Policy],
    windows: Sequence[Window],
    protocol: Protocol,
    kernels: str = "auto",
    progress: Callable[[], None] = lambda: None,
) -> list[Figures]:
    """Figures over all positions of all windows, a policy each.

    kernels: as in `LLM`. progress: called after each decode step. Raises PolicyError, FormatError, RequestError or
    OutOfPages for policies and windows that do not fit the model or the machine.
    """
    found: dict[int, Figures] = {}
    for pool in pools(model, policies):
        own = [policies[i] for i in pool]
        at_a_time = max(1, protocol.rows // (1 + len(own)))
        dense = (dense_name(model.decoder.dtype),)
        llm = open_for(model, own[0], protocol.length, min(at_a_time, len(windows)) * (1 + len(own)), dense, kernels)
        parts: list[list[tuple[Positions, KVReport]]] = [[] for _ in own]
        for first in range(0, len(windows), at_a_time):
            batch = windows[first : first + at_a_time]
            for part, results in zip(parts, _run(llm.engine, own, batch, protocol, progress), strict=True):
                part += results
        found |= {i: _figures(part) for i, part in zip(pool, parts, strict=True)}
    return [found[i] for i in range(len(policies))]


def batches(model: LoadedModel, policies: Sequence[Policy], windows: int, protocol: Protocol) -> int:
    """How many runs of `protocol.forced` decode steps `measure` takes."""
    return sum(-(-windows // max(1, protocol.rows // (1 + len(pool)))) for pool in pools(model, policies))


def _run(
    engine: Engine,
    policies: Sequence[Policy],
    windows: Sequence[Window],
    protocol: Protocol,
    progress: Callable[[], None],
) -> list[list[tuple[Positions, KVReport]]]:
    """For each policy, positions and report of each window."""
    rows = [
        ForcedRow(w.ids[: protocol.prompt], w.ids[protocol.prompt : -1], policy)
        for w in windows
        for policy in (Full(), *policies)
    ]
    run = ForcedRun(engine, rows)
    meters = [DivergenceMeter() for _ in windows]
    count = 1 + len(policies)
    for step, logits in enumerate(run):
        for meter, part, window in zip(meters, torch.split(logits, count), windows, strict=True):
            meter.update(part[0], part[1:], window.ids[protocol.prompt + 1 + step])
        progress()
    positions = [meter.positions() for meter in meters]
    return [[(own[i], run.reports[w * count + 1 + i]) for w, own in enumerate(positions)] for i in range(len(policies))]


def _figures(parts: Sequence[tuple[Positions, KVReport]]) -> Figures:
    kl = torch.cat([positions.kl for positions, _ in parts])
    agree = torch.cat([positions.agree for positions, _ in parts])
    return Figures(
        positions=len(kl),
        mean_kl=float(kl.mean()),
        worst_decile_kl=float(kl.topk(-(-len(kl) // 10)).values.mean()),
        agreement=float(agree.double().mean()),
        ratio=fmean(report.ratio for _, report in parts),
        per_entry=fmean(report.bytes_per_live_token for _, report in parts),
    )
