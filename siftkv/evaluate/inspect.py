"""What a policy keeps of a request while it runs: a picture of every head at every trigger, as numbers."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from siftkv.engine.fates import token_fates
from siftkv.engine.llm import LLM
from siftkv.engine.outputs import CompletionOutput
from siftkv.engine.sampling_params import SamplingParams
from siftkv.engine.sequence import Sequence
from siftkv.engine.triggers import Trigger
from siftkv.errors import RequestError
from siftkv.kernels.cuda.select_room import measure_exactly


@dataclass(frozen=True)
class Snapshot:
    """What all heads held after a trigger or, under a policy without triggers, after some more tokens.

    fates: int8 `[L, H, seen]`, as `siftkv.engine.fates.token_fates` tells them: tiers, the window, -1 = dropped.
    """

    fates: Tensor
    trigger: Trigger | None

    @property
    def seen(self) -> int:
        """Tokens that the request had seen."""
        return self.fates.shape[-1]

    @property
    def kept(self) -> Tensor:
        """Tokens that each head holds, int64 `[L, H]`."""
        return (self.fates >= 0).sum(-1)

    @property
    def utilisation(self) -> float:
        """Mean tokens a head by those of the longest head."""
        return float(self.kept.float().mean() / self.kept.max().clamp_min(1))

    def to_dict(self) -> dict[str, Any]:
        """JSON types; fates as runs `[fate, tokens]` along each head."""
        return {
            "seen": self.seen,
            "kept": self.kept.tolist(),
            "utilisation": self.utilisation,
            "trigger": self.trigger and self.trigger.to_dict(),
            "fates": [[_runs(head) for head in layer] for layer in self.fates],
        }


@dataclass(frozen=True)
class Inspection:
    """A request from its prompt to its end. tiers: names of the pool's tiers, which fates count."""

    model: str
    policy: str
    tiers: list[str]
    prompt_tokens: int
    output: CompletionOutput
    snapshots: list[Snapshot]

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON types."""
        report = self.output.kv
        return {
            "model": self.model,
            "kv": self.policy,
            "tiers": self.tiers,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": len(self.output.token_ids),
            "text": self.output.text,
            "report": report and report.to_dict(),
            "snapshots": [snapshot.to_dict() for snapshot in self.snapshots],
        }


def inspect_request(
    llm: LLM, prompt_ids: SequenceOf[int], params: SamplingParams, every: int, advance: Callable[[], None]
) -> Inspection:
    """Run one prompt under the engine's own policy and look after every trigger, or where there are none after every
    `every` tokens. `advance` is called after each token. From then on this LLM's triggers measure coverage exactly,
    which takes them longer. Raises what `Engine.add` raises, the request's own error, and
    RequestError for one that ends with its first token, when nothing can be looked at yet.
    """
    engine = llm.engine
    measure_exactly(llm.cache.state)
    name = engine.add(prompt_ids, params, llm.kv)
    [sequence] = engine.sequences(name)
    snapshots: list[Snapshot] = []
    try:
        while sequence.finish_reason is None:
            engine.step()
            advance()
            if sequence.slot >= 0 and sequence.output_ids and _is_time(sequence, snapshots, every):
                snapshots.append(Snapshot(_all_fates(llm, sequence.slot), _last_trigger(sequence)))
    finally:
        engine.abort(name)
        engine.forget(name)
    if sequence.error is not None:
        raise sequence.error
    if not snapshots:
        raise RequestError("the request ended with its first token: ask for 2 or more, or give a shorter prompt")
    tiers = [tier.name for tier in llm.cache.spec.tiers]
    return Inspection(llm.model.name, llm.kv.describe(), tiers, len(prompt_ids), sequence.output(), snapshots)


def _is_time(sequence: Sequence, snapshots: list[Snapshot], every: int) -> bool:
    if not snapshots:
        return True
    if sequence.cascade is not None:
        return _last_trigger(sequence) is not snapshots[-1].trigger
    return sequence.seen - snapshots[-1].seen >= every


def _last_trigger(sequence: Sequence) -> Trigger | None:
    history = sequence.cascade.history if sequence.cascade is not None else []
    return history[-1] if history else None


def _all_fates(llm: LLM, slot: int) -> Tensor:
    """int8 `[L, H, seen]`."""
    spec = llm.cache.spec
    layers = [
        torch.stack([token_fates(llm.cache, slot, layer, head) for head in range(spec.num_kv_heads)])
        for layer in range(spec.num_layers)
    ]
    return torch.stack(layers)


def _runs(fate: Tensor) -> list[list[int]]:
    value, count = torch.unique_consecutive(fate, return_counts=True)
    return [list(pair) for pair in zip(value.tolist(), count.tolist(), strict=True)]
