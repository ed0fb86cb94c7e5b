"""A load in which clients go away at random points and send nonsense, and whether the others notice."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from siftkv.benchmarks.results import Row
from siftkv.benchmarks.serve import MakeWorks
from siftkv.benchmarks.serve_load import Load, Outcome, Target, Work
from siftkv.benchmarks.serve_watch import ServerState, Watch
from siftkv.errors import SiftKVError

GAP = 1e-4
"""Nats. Where the two likeliest tokens stand closer than this, another batch may rightly choose the other one."""


@dataclass(frozen=True)
class Difference:
    """An undisturbed request whose text changed: which one, at which token, and how close the choice was there (nats);
    gap None where the server sent no log-probabilities.
    """

    request: int
    token: int
    gap: float | None


@dataclass(frozen=True)
class Disturbed:
    """What a disturbed run did. state: of the server once it had nothing left to do."""

    sent: int
    left: int
    malformed: int
    refused: int
    untouched: int
    untouched_errors: dict[str, int]
    malformed_errors: dict[str, int]
    same: int
    differences: list[Difference]
    state: ServerState


async def run_disturbed(
    target: Target,
    make: MakeWorks,
    requests: int,
    clients: int,
    leave_share: float,
    malformed_share: float,
    seed: int = 0,
) -> Disturbed:
    """The same greedy requests twice: as they are, then with a share of clients that leave and of nonsense.

    Raises SiftKVError for shares that leave nobody undisturbed, and when the undisturbed run has errors.
    """
    if min(leave_share, malformed_share) < 0 or leave_share + malformed_share >= 1:
        raise SiftKVError("the shares of clients that leave and of malformed requests must add up to less than 1")
    logprobs = {"logprobs": 2} if target.endpoint == "completions" else {"logprobs": True, "top_logprobs": 2}
    target = replace(target, extra={**target.extra, "temperature": 0, **logprobs})
    generator = random.Random(f"{seed} disturb")
    works = make(requests, generator)
    disturbed = disturb(works, target, leave_share, malformed_share, generator)
    async with Load(target) as load:
        before = await load.closed_loop(works, clients, None)
    failed = next((o for o in before if o.status != "ok"), None)
    if failed is not None:
        raise SiftKVError(f"a request failed although nothing disturbed it: {failed.error}")
    async with Watch(target) as watch, Load(target) as load:
        after = await load.closed_loop(disturbed, clients, None)
        state = await watch.settle()
    return compare(disturbed, before, after, state)


def disturb(
    works: Sequence[Work], target: Target, leave_share: float, malformed_share: float, generator: random.Random
) -> list[Work]:
    """The same requests, of which a share leaves after a random number of pieces and another share is malformed."""
    order = generator.sample(range(len(works)), len(works))
    leavers, broken = round(leave_share * len(works)), round(malformed_share * len(works))
    found = list(works)
    for place in order[:leavers]:
        found[place] = replace(works[place], leave_after=generator.randrange(works[place].max_tokens))
    for place in order[leavers : leavers + broken]:
        found[place] = replace(works[place], malformed=generator.choice(malformed_bodies(target, works[place])))
    return found


def malformed_bodies(target: Target, work: Work) -> list[bytes]:
    """Bodies that every OpenAI-compatible server refuses."""
    good = target.body(work)
    asked = "messages" if target.endpoint == "chat" else "prompt"
    without = {name: value for name, value in good.items() if name != asked}
    changes: list[dict[str, Any]] = [
        {"max_tokens": -1},
        {"max_tokens": "many"},
        {"temperature": "hot"},
        {"top_p": 7},
        {"model": "no-such-model"},
        {"stop": {"a": 1}},
        {asked: 5},
        {asked: []},
    ]
    bodies = [json.dumps(body).encode() for body in [without, [], *({**good, **change} for change in changes)]]
    return [b"", b"{", json.dumps(good).encode()[:-9], b"\xff\xfe", *bodies]


def compare(
    disturbed: Sequence[Work], before: Sequence[Outcome], after: Sequence[Outcome], state: ServerState
) -> Disturbed:
    """Hold the requests that nothing touched against the undisturbed run."""
    untouched = [i for i, w in enumerate(disturbed) if w.malformed is None and w.leave_after is None]
    malformed = [i for i, w in enumerate(disturbed) if w.malformed is not None]
    whole = [i for i in untouched if after[i].status == "ok"]
    differences = [_difference(i, before[i], after[i]) for i in whole if before[i].text != after[i].text]
    return Disturbed(
        sent=len(disturbed),
        left=sum(o.status == "left" for o in after),
        malformed=len(malformed),
        refused=sum(after[i].status == "refused" for i in malformed),
        untouched=len(untouched),
        untouched_errors=_errors([after[i] for i in untouched]),
        malformed_errors=_errors([after[i] for i in malformed if after[i].status != "refused"]),
        same=len(whole) - len(differences),
        differences=differences,
        state=state,
    )


def _errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    found: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            found[outcome.error] = found.get(outcome.error, 0) + 1
    return found


def _difference(request: int, before: Outcome, after: Outcome) -> Difference:
    pairs = enumerate(zip(before.tokens, after.tokens))
    token, gap = next(((i, a[1]) for i, (a, b) in pairs if a[0] != b[0]), (-1, None))
    return Difference(request, token, gap)


def rows(found: Disturbed, label: str) -> list[Row]:
    """The figures that a results file lists."""
    state = found.state
    far = sum(d.gap is None or d.gap >= GAP for d in found.differences)
    lost = None if state.pages_total is None or state.pages_free is None else state.pages_total - state.pages_free
    told = [
        ("untouched requests without a whole answer", sum(found.untouched_errors.values()), f"of {found.untouched}"),
        ("malformed requests that were not refused", found.malformed - found.refused, f"of {found.malformed}"),
        (f"untouched texts that differ where the choice was not within {GAP:g} nats", far, f"of {found.untouched}"),
    ]
    if lost is not None:
        told.append(("pages that did not come back", lost, f"of {state.pages_total}"))
        told.append(("completions that the server still has", state.live or 0, "completions"))
        told.append(("integrity faults", int(not state.integrity_ok), "faults"))
    held = [Row(what=f"{label}: {what}", value=value, unit=unit, bar="<= 0") for what, value, unit in told]
    same = Row(what=f"{label}: untouched texts that are the same", value=found.same, unit=f"of {found.untouched}")
    return [*held, same, Row(what=f"{label}: clients that left", value=found.left, unit=f"of {found.sent}")]


def to_data(found: Disturbed, label: str, about: dict[str, Any]) -> dict[str, Any]:
    """The `data` of a results file."""
    return about | {"label": label, "disturbed": asdict(found)}
