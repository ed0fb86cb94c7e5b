"""The gate: how far sifted caches move a model's next-token distributions, fed through the real decode path.

Windows of text are run as `siftkv.benchmarks.fidelity` runs them, each setting beside a row of `full` in its batch;
what is kept here is every position of every window, so that buckets, quantiles and intervals come from
all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from siftkv.benchmarks.fidelity import Comparison, Protocol, Window, feed, open_pool
from siftkv.benchmarks.fidelity import plan as plan_batches
from siftkv.engine.outputs import KVReport
from siftkv.evaluate.bootstrap import Floats
from siftkv.evaluate.divergence import Positions
from siftkv.evaluate.report import cache_fields
from siftkv.evaluate.resume import Records
from siftkv.models import LoadedModel

_DIGITS = 6
"""Significant digits of a position's figures in a record."""


@dataclass(frozen=True)
class WindowResult:
    """One setting on one window, P positions: kl, nll, reference_nll fp64 `[P]` in nats, agree `[P]` of 0 and 1.

    cache: the fields of a `KVReport` after the last position, counts by head left out.
    """

    kv: str
    text: str
    window: int
    kl: Floats
    agree: Floats
    nll: Floats
    reference_nll: Floats
    cache: dict[str, Any]


def run(
    model: LoadedModel,
    windows: Sequence[Window],
    settings: Sequence[str],
    protocol: Protocol,
    records: Records,
    kernels: str = "auto",
    progress: Callable[[], None] = lambda: None,
) -> list[WindowResult]:
    """Measure what `records` lacks, writing each batch's windows as it ends; results of all, by setting, then window.

    kernels: as in `LLM`. progress: called after each decode step. Raises PolicyError, FormatError, RequestError or
    OutOfPages for settings and windows that do not fit the model or the machine.
    """
    for pool, batches in pending(model, windows, settings, protocol, records):
        llm = open_pool(model, pool, batches, protocol, kernels)
        for batch in batches:
            for window, own, measured, reports in feed(llm, batch, protocol, progress):
                for kv, positions, report in zip(own, measured, reports, strict=True):
                    records.add(kv, _item(window), _fields(positions, report))
    found = [(kv, w, records.get(kv, _item(w))) for kv in settings for w in windows]
    return [_result(kv, window, record) for kv, window, record in found if record is not None]


def pending(
    model: LoadedModel, windows: Sequence[Window], settings: Sequence[str], protocol: Protocol, records: Records
) -> list[tuple[list[str], list[list[Comparison]]]]:
    """Batches of what `records` lacks, with the settings that share a cache: pools as in `fidelity.Plan`.

    Raises PolicyError for a setting that names no policy.
    """
    left = []
    for pool, batches in plan_batches(model, windows, settings, protocol).pools:
        filtered = [[(w, [kv for kv in own if records.get(kv, _item(w)) is None]) for w, own in b] for b in batches]
        kept = [[(w, own) for w, own in batch if own] for batch in filtered]
        kept = [batch for batch in kept if batch]
        if kept:
            left.append((pool, kept))
    return left


def _item(window: Window) -> str:
    """A window by what it is cut from; its tokens are part of the name, so that a changed text is another item."""
    tokens = zlib.crc32(",".join(map(str, window.ids)).encode())
    return f"{window.text}/{window.index}/{tokens:08x}"


def _fields(positions: Positions, report: KVReport) -> dict[str, Any]:
    def rounded(values: torch.Tensor) -> list[float]:
        return [float(f"{x:.{_DIGITS}g}") for x in values.tolist()]

    return {
        "kl": rounded(positions.kl),
        "agree": "".join("1" if x else "0" for x in positions.agree.tolist()),
        "nll": rounded(positions.nll),
        "reference_nll": rounded(positions.reference_nll),
        "cache": cache_fields(report.to_dict()),
    }


def _result(kv: str, window: Window, record: dict[str, Any]) -> WindowResult:
    kl, nll, reference = (np.asarray(record[name], dtype=np.float64) for name in ("kl", "nll", "reference_nll"))
    agree = np.asarray([float(x) for x in record["agree"]])
    return WindowResult(kv, window.text, window.index, kl, agree, nll, reference, record["cache"])
