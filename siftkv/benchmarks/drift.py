"""What condensation costs over many triggers: drift of the log of the softmax sum, evicting and merging side by side.

Hard-KV (arXiv 2606.28831, appendix G) takes the log-sum-exp of a head's logits as a sign of health: evicted tokens are
missing from it. The same text is fed to a full cache and to two condensed ones; after every trigger the full cache's
newest query looks at what each holds.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from siftkv import LLM, Full, HardKV
from siftkv.benchmarks.results import Row
from siftkv.engine.forced import ForcedRow, ForcedRun
from siftkv.policies import Policy
from siftkv.policies.hardkv.condense import log_sum_exp

KINDS = ("evict", "merge")


def policies(budget: int, interval: int) -> list[Policy]:
    """The full cache, and two that hold `budget` tokens a head after every trigger, `interval` positions apart.

    The one that merges comes last: a pool that is opened for it serves all.
    """
    low = 2 * interval
    hard = [
        HardKV(p=0.95, budget=budget, lower=low, upper=low, interval=interval, condense=kind)  # type: ignore[arg-type]
        for kind in KINDS
    ]
    return [Full(), *hard]


@dataclass
class Drift:
    """One kind of condensation over time. position: tokens seen at each look. signed, absolute: mean over layers and
    query heads of the difference in log-sum-exp to the full cache, and of its size. kl: mean divergence of the next
    token's distribution from the full cache's since the last look, in nats.
    """

    position: list[int] = field(default_factory=list)
    signed: list[float] = field(default_factory=list)
    absolute: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)


def measure(
    llm: LLM, ids: SequenceOf[int], prompt: int, policies: list[Policy], advance: Callable[[], None]
) -> dict[str, Drift]:
    """Feed `ids` after the first `prompt` of them to all policies. `advance` is called after each token."""
    run = ForcedRun(llm.engine, [ForcedRow(ids[:prompt], ids[prompt:], policy) for policy in policies])
    found = {kind: Drift() for kind in KINDS}
    since: list[Tensor] = []
    looked = 0
    for step, logits in enumerate(run):
        logp = logits.log_softmax(-1)
        since.append((logp[:1].exp() * (logp[:1] - logp[1:])).sum(-1))
        triggers = run.cascades[1]
        if triggers is not None and len(triggers.history) > looked:
            looked = len(triggers.history)
            _look(llm, run.slots, prompt + step + 1, torch.stack(since).mean(0), found)
            since.clear()
        advance()
    return found


def _look(llm: LLM, slots: list[int], position: int, kl: Tensor, found: dict[str, Drift]) -> None:
    layers = [_sums(llm, layer, slots) for layer in range(llm.cache.spec.num_layers)]
    sums = torch.stack(layers)  # [L, rows, H, G]
    for row, drift in enumerate(found.values()):
        off = sums[:, row + 1] - sums[:, 0]
        drift.position.append(position)
        drift.signed.append(float(off.mean()))
        drift.absolute.append(float(off.abs().mean()))
        drift.kl.append(float(kl[row]))


def _sums(llm: LLM, layer: int, slots: list[int]) -> Tensor:
    """Log-sum-exp of the first slot's newest query over what each slot holds: fp32 `[rows, H, G]`."""
    q, _ = llm.cache.queries(layer, slots[0])
    newest = q[-1].unflatten(0, (llm.cache.spec.num_kv_heads, -1))  # [H, G, D]
    held = [llm.cache.tokens(layer, slot) for slot in slots]
    return torch.stack([log_sum_exp(newest, x.k, x.weight, x.position >= 0) for x in held])


def to_rows(found: dict[str, Drift]) -> list[Row]:
    """Figures for a results file: means over the second half of the triggers."""
    rows = []
    for kind, drift in found.items():
        late = len(drift.position) // 2
        for what, values, unit in (("|LSE drift|", drift.absolute, "nats"), ("KL", drift.kl, "nats")):
            tail = values[late:]
            mean = sum(tail) / len(tail) if tail else None
            rows.append(Row(what=f"{kind}: mean {what}, second half of the triggers", value=mean, unit=unit))
    return rows


def to_data(found: dict[str, Drift], about: dict[str, Any]) -> dict[str, Any]:
    """Everything, as JSON types."""
    return about | {"drift": {kind: vars(drift) for kind, drift in found.items()}}


def plot(found: dict[str, Drift], path: str, title: str) -> None:
    """Drift and divergence over the triggers. Raises SiftKVError when the file cannot be written."""
    from siftkv.evaluate.plots import new_figure, save_figure

    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    for (kind, drift), colour in zip(found.items(), ("#f28e2b", "#2f7fc1"), strict=True):
        left.plot(drift.position, drift.signed, color=colour, label=f"{kind}, mean")
        left.plot(drift.position, drift.absolute, ":", color=colour, label=f"{kind}, mean of sizes")
        right.plot(drift.position, drift.kl, color=colour, label=kind)
    left.axhline(0, color="grey", lw=0.8)
    left.set_ylabel("log-sum-exp less the full cache's, nats")
    right.set_ylabel("KL to the full cache, nats")
    right.set_yscale("log")
    for axis in (left, right):
        axis.set_xlabel("tokens of context")
        axis.legend(frameon=False, fontsize=8)
    save_figure(figure, path, title)
