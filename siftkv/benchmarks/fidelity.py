"""How far a sifted cache moves a model's answers, against the bytes that it holds.

Teacher-forced, through the real prompt and decode paths.

A window is `prompt` tokens, prefilled and sifted, then `forced` tokens fed one by one, and one more that is only
predicted. Every setting runs beside `full` in the same batch, since a batch of another size rounds differently, and is
compared with that row token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from siftkv.benchmarks.opening import open_for
from siftkv.benchmarks.texts import Text, cut_windows, leading_tokens, tokenize
from siftkv.cache import dense_name
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.engine.llm import LLM
from siftkv.engine.outputs import KVReport
from siftkv.errors import SiftKVError
from siftkv.evaluate.divergence import Divergence, Positions
from siftkv.evaluate.gate_meter import GroupMeter
from siftkv.models import LoadedModel
from siftkv.policies import Full, Policy, parse_policy

SETTINGS = ("full", "uniform:k8v4", "uniform:k4v4", "uniform:k4v2", "diffkv")
GRID_HIGH = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0)
GRID_LOW = (0.0, 0.02, 0.05, 0.1, 0.2)
_CLOSEST = 0.5
"""Grid pairs whose alpha_low is above this share of alpha_high are left out: hardly a token lies between the two."""


@dataclass(frozen=True)
class Protocol:
    """How windows are cut and run. Raises SiftKVError for a value out of range.

    prompt, forced: tokens a window, see above. windows: how many a text, end to end from token `offset` on.
    rows: requests a batch at most.
    """

    prompt: int = 1536
    forced: int = 512
    windows: int = 1
    offset: int = 0
    rows: int = 8

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("forced", 1), ("windows", 1), ("offset", 0), ("rows", 2)):
            if getattr(self, name) < least:
                raise SiftKVError(f"{name}={getattr(self, name)}: use {least} or more")

    @property
    def length(self) -> int:
        """Tokens of one window."""
        return self.prompt + self.forced + 1


@dataclass(frozen=True)
class Window:
    """Tokens `ids` of the `index`-th window of a text."""

    text: str
    index: int
    ids: list[int]


@dataclass(frozen=True)
class Measurement:
    """One setting on one window."""

    kv: str
    text: str
    window: int
    divergence: Divergence
    cache: KVReport


def grid() -> list[str]:
    """`kv` strings of the diffkv curve."""
    pairs = [(high, low) for high in GRID_HIGH for low in GRID_LOW if low <= _CLOSEST * high]
    return [f"diffkv:alpha_high={high:g},alpha_low={low:g}" for high, low in pairs]


def distinct(settings: Iterable[str]) -> list[str]:
    """Settings without those that name the policy of an earlier one. Raises PolicyError for one that names none."""
    known: dict[str, str] = {}
    for kv in settings:
        known.setdefault(parse_policy(kv).describe(), kv)
    return list(known.values())


def windows_of(model: LoadedModel, texts: Iterable[Text], protocol: Protocol) -> list[Window]:
    """Windows of every text: window `i` starts at token `offset + i * (prompt + forced)`.

    Raises SiftKVError for a text that is too short, or two of the same name.
    """
    lead = leading_tokens(model.tokenizer)
    stride = protocol.prompt + protocol.forced
    windows: list[Window] = []
    for text in texts:
        if any(text.name == window.text for window in windows):
            raise SiftKVError(f"two texts are called {text.name}: rename a file, since results go by these names")
        ids = tokenize(model.tokenizer, text)
        cut = cut_windows(ids, lead, text.name, protocol.length, protocol.windows, stride, protocol.offset)
        windows += [Window(text.name, i, tokens) for i, tokens in enumerate(cut)]
    return windows


Comparison = tuple[Window, list[str]]
"""Settings that are compared with `full` on a window, in one batch."""


@dataclass(frozen=True)
class Plan:
    """What runs in which batch. pools: settings that share a cache, and their batches."""

    windows: Sequence[Window]
    settings: Sequence[str]
    protocol: Protocol
    pools: list[tuple[list[str], list[list[Comparison]]]]

    @property
    def steps(self) -> int:
        """Decode steps of all batches."""
        return self.protocol.forced * sum(len(batches) for _, batches in self.pools)


def plan(model: LoadedModel, windows: Sequence[Window], settings: Sequence[str], protocol: Protocol) -> Plan:
    """Batches for every setting on every window. Raises PolicyError for a setting that names no policy."""
    pools = _pools(settings, dense_name(model.decoder.dtype))
    return Plan(windows, settings, protocol, [(pool, list(_pack(windows, pool, protocol.rows))) for pool in pools])


def measure(
    model: LoadedModel, plan: Plan, kernels: str = "auto", progress: Callable[[], None] = lambda: None
) -> list[Measurement]:
    """Every setting on every window, in the order of the plan's settings, then of its windows.

    kernels: as in `LLM`. progress: called after each decode step.
    Raises PolicyError, FormatError or RequestError for settings and windows that do not fit the model.
    """
    found: list[Measurement] = []
    for pool, batches in plan.pools:
        llm = open_pool(model, pool, batches, plan.protocol, kernels)
        for batch in batches:
            for window, own, positions, reports in feed(llm, batch, plan.protocol, progress):
                found += [
                    Measurement(kv, window.text, window.index, Divergence.of(figures), report)
                    for kv, figures, report in zip(own, positions, reports, strict=True)
                ]
    place = {(w.text, w.index): i for i, w in enumerate(plan.windows)}
    order = {kv: i for i, kv in enumerate(plan.settings)}
    return sorted(found, key=lambda m: (order[m.kv], place[m.text, m.window]))


def _pools(settings: Sequence[str], dense: str) -> list[list[str]]:
    """Settings that may share a cache: those that need the same one, so that each is charged what it really takes."""
    pools: dict[object, list[str]] = {}
    for kv in settings:
        policy = parse_policy(kv)
        needs = policy.tiers(dense), policy.window, policy.sinks, policy.query_rows, policy.skips
        pools.setdefault(needs, []).append(kv)
    return list(pools.values())


def _pack(windows: Sequence[Window], settings: list[str], rows: int) -> Iterator[list[Comparison]]:
    """Batches of at most `rows` requests, each comparison with a row of `full` of its own."""
    chunk = rows - 1
    parts = [settings[i : i + chunk] for i in range(0, len(settings), chunk)]
    batch: list[Comparison] = []
    for part in parts:
        for window in windows:
            if sum(_rows(c) for c in batch) + 1 + len(part) > rows:
                yield batch
                batch = []
            batch.append((window, part))
    if batch:
        yield batch


def _rows(comparison: Comparison) -> int:
    return 1 + len(comparison[1])


def open_pool(
    model: LoadedModel, settings: list[str], batches: list[list[Comparison]], protocol: Protocol, kernels: str
) -> LLM:
    """An engine for settings that share a cache, with room for `full` and for the largest of the batches."""
    rows = max(sum(_rows(c) for c in batch) for batch in batches)
    dense = dense_name(model.decoder.dtype)
    return open_for(model, parse_policy(settings[0]), protocol.length, rows, (dense,), kernels)


def feed(
    llm: LLM, batch: list[Comparison], protocol: Protocol, progress: Callable[[], None]
) -> Iterator[tuple[Window, list[str], list[Positions], list[KVReport]]]:
    """Run a batch, each window under each of its settings beside a row of `full`: window, settings, what was measured
    of each setting and its report.
    """
    rows: list[ForcedRow] = []
    for window, settings in batch:
        split = window.ids[: protocol.prompt], window.ids[protocol.prompt : -1]
        policies: list[Policy] = [Full(), *(parse_policy(kv) for kv in settings)]
        rows += [ForcedRow(*split, policy) for policy in policies]
    sizes = [_rows(c) for c in batch]
    meter = GroupMeter(sizes)
    run = ForcedRun(llm.engine, rows)
    for step, logits in enumerate(run, protocol.prompt + 1):
        meter.update(logits, [window.ids[step] for window, _ in batch])
        progress()
    start = 0
    for (window, settings), positions, size in zip(batch, meter.positions(), sizes, strict=True):
        yield window, settings, positions, run.reports[start + 1 : start + size]
        start += size
