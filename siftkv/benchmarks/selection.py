"""How many tokens top-p keeps when it is applied to a metric other than attention: "selection collapse".

Hard-KV (arXiv 2606.28831, figure 2) says that the count falls apart from attention's at the same p, and calibrates
metrics for that reason. Here the counts of real prompts are compared row by row (query and query head), and how far one
temperature a head brings them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from siftkv import LLM, HardKV, SamplingParams
from siftkv.benchmarks.results import Row
from siftkv.policies.hardkv.calibration import calibrated_count, solve_temperature
from siftkv.policies.hardkv.metrics import METRICS
from siftkv.policies.hardkv.rows import LayerTokens, attention_rows, top_p_count

QUERIES = 32
SHARES = (0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_COMPARED = tuple(name for name in METRICS if name != "attention")


def policy() -> HardKV:
    """A setting that measures and drops nothing: all tokens dense, the last queries at hand, scores kept."""
    return HardKV(p=1.0, metric="accumulated", queries=QUERIES, lower=1 << 30, upper=1 << 30)


@dataclass
class Counts:
    """Counts of one metric at one p, a row each; and of one temperature a head. `oracle` is attention's."""

    oracle: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)
    calibrated: list[Tensor] = field(default_factory=list)
    temperature: list[Tensor] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Means over rows, the geometric mean and the spread of the ratio of counts, and what calibration leaves."""
        oracle, own, fixed = (torch.cat(x).double() for x in (self.oracle, self.own, self.calibrated))
        ratio = (own / oracle).log()
        low, middle, high = ratio.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).exp().tolist()
        return {
            "attention_count": float(oracle.mean()),
            "metric_count": float(own.mean()),
            "geometric_ratio": float(ratio.mean().exp()),
            "ratio_p10": low,
            "ratio_median": middle,
            "ratio_p90": high,
            "calibrated_count": float(fixed.mean()),
            "calibrated_geometric_ratio": float((fixed / oracle).log().mean().exp()),
            "temperature_median": float(torch.cat(self.temperature).median()),
        }


def layers_of(llm: LLM, ids: SequenceOf[int]) -> Iterator[LayerTokens]:
    """Run a prompt and hand out what its heads hold, layer by layer; `llm` lives by `policy()`."""
    engine = llm.engine
    name = engine.add(ids, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), llm.kv)
    try:
        engine.step()
        slot = engine.sequences(name)[0].slot
        for layer in range(llm.cache.spec.num_layers):
            q, position = llm.cache.queries(layer, slot)
            held = llm.cache.tokens(layer, slot)
            yield LayerTokens(q, position, held.k, held.position, held.tier >= 0, None, held.score)
    finally:
        engine.abort(name)
        engine.forget(name)


def measure(
    llm: LLM, prompts: SequenceOf[SequenceOf[int]], advance: Callable[[], None]
) -> dict[str, dict[float, Counts]]:
    """Counts by metric and p over all layers, heads and rows of the prompts. `advance` is called after each layer."""
    found = {name: {p: Counts() for p in SHARES} for name in _COMPARED}
    with torch.inference_mode():
        for ids in prompts:
            for tokens in layers_of(llm, ids):
                _add(found, tokens)
                advance()
    return found


def _add(found: dict[str, dict[float, Counts]], tokens: LayerTokens) -> None:
    rows = attention_rows(tokens)
    for name, by_share in found.items():
        logits = METRICS[name](7).logits(rows, tokens)
        largest = logits.sort(-1, descending=True).values
        own = logits.softmax(-1)
        for p, counts in by_share.items():
            oracle = top_p_count(rows.raw, rows.visible, p)
            temperature = solve_temperature(largest, oracle, p).log().median(-1).values.exp()
            fixed = calibrated_count(largest, temperature[:, None].expand(oracle.shape), p)
            counts.oracle.append(oracle.flatten())
            counts.own.append(top_p_count(own, rows.visible, p).flatten())
            counts.calibrated.append(fixed.flatten())
            counts.temperature.append(temperature)


def to_rows(found: dict[str, dict[float, Counts]]) -> list[Row]:
    """Figures for a results file: at p = 0.9, each metric's count as a share of attention's."""
    rows = []
    for name, by_share in found.items():
        summary = by_share[0.9].summary()
        for key, what in (
            ("geometric_ratio", "uncalibrated"),
            ("calibrated_geometric_ratio", "one temperature a head"),
        ):
            rows.append(Row(what=f"{name} count at p=0.9, {what}", value=summary[key], unit="of attention's"))
    return rows


def to_data(found: dict[str, dict[float, Counts]], about: dict[str, Any]) -> dict[str, Any]:
    """Everything, as JSON types."""
    return about | {"metrics": {n: {str(p): c.summary() for p, c in by_share.items()} for n, by_share in found.items()}}


def plot(found: dict[str, dict[float, Counts]], path: str, title: str) -> None:
    """Counts against attention's: means over p, and the spread of the ratio at p = 0.9, before and after calibration.

    Raises SiftKVError when the file cannot be written.
    """
    from siftkv.evaluate.plots import new_figure, save_figure

    figure = new_figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    first = next(iter(found.values()))
    left.plot(SHARES, [c.summary()["attention_count"] for c in first.values()], "k-o", label="attention")
    colours = ("#2f7fc1", "#f28e2b", "#59a14f")
    for (name, by_share), colour in zip(found.items(), colours, strict=True):
        summaries = [c.summary() for c in by_share.values()]
        left.plot(SHARES, [s["metric_count"] for s in summaries], "-o", color=colour, label=f"{name}, its own top-p")
        left.plot(SHARES, [s["calibrated_count"] for s in summaries], ":", color=colour, label=f"{name}, calibrated")
    left.set_yscale("log")
    left.set_xlabel("p")
    left.set_ylabel("tokens kept a row, mean")
    left.legend(frameon=False, fontsize=8)
    labels, ratios, shades = [], [], []
    for (name, by_share), colour in zip(found.items(), colours, strict=True):
        counts = by_share[0.9]
        for what, own in (("own", counts.own), ("calibrated", counts.calibrated)):
            labels.append(f"{name}\n{what}")
            ratios.append((torch.cat(own) / torch.cat(counts.oracle)).log2().numpy())
            shades.append(colour)
    boxes = right.boxplot(ratios, showfliers=False, whis=(10, 90), patch_artist=True, medianprops={"color": "black"})
    for box, shade in zip(boxes["boxes"], shades, strict=True):
        box.set_facecolor(shade)
    right.set_xticks(range(1, len(labels) + 1), labels, fontsize=7)
    right.axhline(0, color="grey", lw=0.8)
    right.set_ylabel("log2 of count / attention's count, p = 0.9")
    save_figure(figure, path, title)
