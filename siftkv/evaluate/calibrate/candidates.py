"""Candidates measured side by side against the full cache, each window's prompt run once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from siftkv.benchmarks.fidelity import Protocol, Window
from siftkv.cache import dense_name
from siftkv.engine.engine import Engine
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.engine.llm import LLM
from siftkv.engine.outputs import KVReport
from siftkv.engine.sizing import MIN_WINDOW
from siftkv.evaluate.divergence import DivergenceMeter, Positions
from siftkv.models import LoadedModel
from siftkv.policies import Full, Policy
from siftkv.policies.profile_file import Figures

Measure = Callable[[Sequence[Policy]], list[Figures]]
"""Figures of candidates, in order."""

_ROOM = 2
"""Times the bytes of the tokens alone: part pages of each head, windows and tables come on top."""

_SPARE = 1 << 26
"""Bytes beside that, for the part pages of short requests."""


def pools(model: LoadedModel, policies: Sequence[Policy]) -> dict[object, list[int]]:
    """Which policies may share a cache: those that need the same one, so that each is charged what it really takes; by
    what they need.
    """
    dense = dense_name(model.decoder.dtype)
    found: dict[object, list[int]] = {}
    for index, policy in enumerate(policies):
        needs = policy.tiers(dense), policy.window, policy.sinks, policy.query_rows, policy.skips
        found.setdefault(needs, []).append(index)
    return found


@dataclass
class Bench:
    """Measures candidates; the cache that was used last stays open for those that need the same.

    windows and protocol are those of a measurement. kernels: as in `LLM`. progress: called after each decode step.
    """

    model: LoadedModel
    windows: Sequence[Window]
    protocol: Protocol
    kernels: str = "auto"
    progress: Callable[[], None] = lambda: None
    _open: tuple[object, LLM] | None = None

    def __call__(self, policies: Sequence[Policy]) -> list[Figures]:
        """Figures over all positions of all windows, a policy each.

        Raises PolicyError, FormatError, RequestError or OutOfPages for policies and windows that do not fit the model
        or the machine.
        """
        found: dict[int, Figures] = {}
        for needs, pool in pools(self.model, policies).items():
            own = [policies[i] for i in pool]
            at_a_time = windows_at_a_time(len(own), len(self.windows), self.protocol)
            llm = self._opened(needs, own[0], at_a_time * (1 + len(own)))
            parts: list[list[tuple[Positions, KVReport]]] = [[] for _ in own]
            for first in range(0, len(self.windows), at_a_time):
                batch = self.windows[first : first + at_a_time]
                for part, results in zip(parts, _run(llm.engine, own, batch, self), strict=True):
                    part += results
            found |= {i: _figures(part) for i, part in zip(pool, parts, strict=True)}
        return [found[i] for i in range(len(policies))]

    def _opened(self, needs: object, policy: Policy, rows: int) -> LLM:
        if self._open is not None and self._open[0] == needs and self._open[1].cache.spec.max_slots >= rows:
            return self._open[1]
        self._open = None  # before the next one takes as much again
        llm = open_small(self.model, policy, self.protocol.length, rows, self.kernels)
        self._open = needs, llm
        return llm


def open_small(model: LoadedModel, policy: Policy, tokens: int, rows: int, kernels: str) -> LLM:
    """An LLM for `rows` requests of at most `tokens` tokens under policies that need what `policy` does, and `full`,
    with little more memory than that takes.
    """
    config = model.config
    a_token = config.num_layers * config.num_kv_heads * config.head_dim * 2 * model.decoder.dtype.itemsize
    each = tokens + policy.window + policy.sinks + MIN_WINDOW
    return LLM(
        model,
        policy,
        formats=(dense_name(model.decoder.dtype),),
        max_model_len=tokens,
        max_num_seqs=rows,
        kv_cache_memory_bytes=_ROOM * rows * each * a_token + _SPARE,
        kernels=kernels,
    )


def windows_at_a_time(policies: int, windows: int, protocol: Protocol) -> int:
    """Windows that run in one batch, each with a row of `full`."""
    return min(windows, max(1, protocol.rows // (1 + policies)))


def batches(model: LoadedModel, policies: Sequence[Policy], windows: int, protocol: Protocol) -> int:
    """How many runs of `protocol.forced` decode steps a measurement takes."""
    return sum(-(-windows // windows_at_a_time(len(p), windows, protocol)) for p in pools(model, policies).values())


def _run(
    engine: Engine, policies: Sequence[Policy], windows: Sequence[Window], bench: Bench
) -> list[list[tuple[Positions, KVReport]]]:
    """For each policy, positions and report of each window."""
    prompt = bench.protocol.prompt
    rows = [ForcedRow(w.ids[:prompt], w.ids[prompt:-1], policy) for w in windows for policy in (Full(), *policies)]
    run = ForcedRun(engine, rows)
    meters = [DivergenceMeter() for _ in windows]
    count = 1 + len(policies)
    for step, logits in enumerate(run):
        for meter, part, window in zip(meters, torch.split(logits, count), windows, strict=True):
            meter.update(part[0], part[1:], window.ids[prompt + 1 + step])
        bench.progress()
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
