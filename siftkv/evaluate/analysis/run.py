"""Measures the evidence: exact attention over prompts, what a policy does with them, and keys against values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from siftkv.benchmarks.fidelity import Protocol, Window
from siftkv.benchmarks.opening import open_for
from siftkv.errors import SiftKVError
from siftkv.evaluate import gate
from siftkv.evaluate.analysis.attention import Observed, kept_attention, observe, span
from siftkv.evaluate.resume import Records
from siftkv.evaluate.stepping import SteppedRow, step_rows
from siftkv.models import LoadedModel
from siftkv.policies import parse_policy

BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5)
PRECISIONS = ("uniform:k8v8", "uniform:k8v4", "uniform:k4v8", "uniform:k4v4")
_SHORTEST = 32


@dataclass(frozen=True)
class Sparsity:
    """At one budget (share of tokens kept): attention kept, 0 to 1, mean over heads and mean of the worst tenth."""

    budget: float
    static_mean: float
    static_worst: float
    dynamic_mean: float
    dynamic_worst: float


@dataclass(frozen=True)
class Analysis:
    """The evidence. observed: by prompt's name. tiers: share of entries by tier, by prompt, under `kv`.

    precision: mean KL in nats a token of uniform formats.
    """

    kv: str
    observed: dict[str, Observed]
    tiers: dict[str, dict[str, float]]
    precision: dict[str, float]

    def sparsity(self) -> list[Sparsity]:
        """Dynamic against static sparsity, means over prompts."""
        found = []
        for budget in BUDGETS:
            means, worsts = {}, {}
            for dynamic in (False, True):
                kept = [kept_attention(o, budget, dynamic).flatten() for o in self.observed.values()]
                means[dynamic] = fmean(float(k.mean()) for k in kept)
                tenth = [max(1, len(k) // 10) for k in kept]
                worsts[dynamic] = fmean(float(k.topk(n, largest=False).values.mean()) for k, n in zip(kept, tenth))
            found.append(Sparsity(budget, means[False], worsts[False], means[True], worsts[True]))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Figures of JSON types."""
        spans = {
            name: {"attention_scores": span(o.scores), "value_norms": span(o.norms)}
            for name, o in self.observed.items()
        }
        return {
            "kv": self.kv,
            "span_orders_of_magnitude": spans,
            "critical_share": {name: o.critical.tolist() for name, o in self.observed.items()},
            "sparsity": [vars(s) for s in self.sparsity()],
            "tiers": self.tiers,
            "precision_mean_kl": self.precision,
        }


def analyse(
    model: LoadedModel,
    prompts: Mapping[str, Sequence[int]],
    window: Window,
    protocol: Protocol,
    kv: str,
    records: Records,
    kernels: str = "auto",
    progress: Callable[[], None] = lambda: None,
) -> Analysis:
    """Analyse prompts, by name, and one window of text on which keys and values are quantised to unlike precision.

    progress: called after each prompt and each step of the window. Raises SiftKVError for a prompt that is too short,
    and what `LLM` raises for a setting that does not fit.
    """
    for name, ids in prompts.items():
        if len(ids) < _SHORTEST:
            raise SiftKVError(f"the prompt {name} has {len(ids)} tokens: give at least {_SHORTEST}")
    observed = {}
    for name, ids in prompts.items():
        observed[name] = observe(model.decoder, ids)
        progress()
    tiers = _tiers(model, prompts, kv, kernels)
    results = gate.run(model, [window], PRECISIONS, protocol, records, kernels, progress)
    return Analysis(kv, observed, tiers, {r.kv: float(r.kl.mean()) for r in results})


def _tiers(
    model: LoadedModel, prompts: Mapping[str, Sequence[int]], kv: str, kernels: str
) -> dict[str, dict[str, float]]:
    """Share of the entries in each tier once a prompt is sifted, window and dropped included."""
    policy = parse_policy(kv)
    llm = open_for(model, policy, max(map(len, prompts.values())) + 1, 1, (), kernels)
    found = {}
    for name, ids in prompts.items():
        [report] = step_rows(llm.engine, [SteppedRow(ids, policy)], lambda rows, logits: [None] * len(rows))
        total = sum(report.tokens_by_tier.values())
        found[name] = {tier: count / total for tier, count in report.tokens_by_tier.items()}
    return found
