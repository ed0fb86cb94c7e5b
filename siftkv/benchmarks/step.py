"""A decode step on a GPU against the least time in which its bytes can be read, and what bookkeeping takes of it.

A Llama-3-8B shape with random bf16 weights. The floor is weights (LM head in, embeddings out) and attended keys and
values over the read ceiling of the same run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from siftkv.benchmarks.kernels import read_ceiling
from siftkv.benchmarks.resident import Resident, graph_ms, resident, weight_bytes
from siftkv.kernels.cuda.sift import coordinate
from siftkv.models import LoadedModel

CONTEXT = 1024
SETTINGS = ("full", "diffkv", f"fixed:high_share=0.1,low_share=0.66,length={2 * CONTEXT}")
BATCHES = (1, 64)
BOOKKEEPING_BATCH = 128
_SIFT_STEPS = 8


@dataclass(frozen=True)
class StepRow:
    """A setting's step.

    weights_floor_ms: weights alone over the read ceiling; floor_ms: with keys and values. launches: kernels a step.
    host_us: what the host takes to launch it. physical: bytes of the cache by bf16's.
    """

    kv: str
    batch: int
    ms: float
    weights_floor_ms: float
    floor_ms: float
    launches: int
    host_us: float
    physical: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SiftRow:
    """What a policy takes of a step, in milliseconds. step_ms and refresh_ms by interval of the scores' refresh (0 =
    never); refresh_ms: what that adds to a step without refresh; sift_ms: classing, demoting and appending tokens.
    """

    kv: str
    batch: int
    default_interval: int
    step_ms: dict[int, float]
    refresh_ms: dict[int, float]
    sift_ms: float

    def share(self, interval: int) -> float:
        """Of the step, refresh and sift together."""
        return (self.refresh_ms[interval] + self.sift_ms) / self.step_ms[interval]


@dataclass(frozen=True)
class BookkeepingRow:
    """What pages take of a step, in milliseconds. coordinate_ms: handing pages out and taking them back. sift_ms: that,
    and writing the tokens that leave the window into them.
    """

    kv: str
    batch: int
    step_ms: float
    coordinate_ms: float
    sift_ms: float


def measure_step(model: LoadedModel, kv: str, batch: int, ceiling: float) -> StepRow:
    """One setting. `ceiling` in GB/s."""
    weights = weight_bytes(model)
    with resident(model, kv, batch, CONTEXT, _pool(batch)) as held:
        ms = held.step_ms()
        floor = (weights + held.kv_bytes()) / ceiling / 1e6
        return StepRow(kv, batch, ms, weights / ceiling / 1e6, floor, held.launches(), held.host_us(), held.ratio())


def measure_sift(model: LoadedModel, kv: str, batch: int) -> SiftRow:
    """A setting at its own refresh interval, at 1, and without refresh, in one cache."""
    with resident(model, kv, batch, CONTEXT, _pool(batch)) as held:
        refresh = held.llm.cache.state.refresh
        default = int(refresh[held.slots[0]])
        steps = {}
        for interval in (0, default, 1):
            refresh[held.slots] = interval
            steps[interval] = held.step_ms()
        added = {interval: ms - steps[0] for interval, ms in steps.items()}
        return SiftRow(kv, batch, default, steps, added, sift_ms(held))


def measure_bookkeeping(model: LoadedModel, kv: str, batch: int) -> BookkeepingRow:
    """Pages of a large batch."""
    with resident(model, kv, batch, CONTEXT, _pool(batch)) as held:
        step = held.step_ms()
        state = held.llm.cache.state

        def hand_out() -> None:
            for _ in range(100):
                coordinate(state, held.slots)

        alone = graph_ms(hand_out) / 100
        return BookkeepingRow(kv, batch, step, alone, sift_ms(held))


@torch.inference_mode()
def sift_ms(held: Resident) -> float:
    """Milliseconds of the policy step alone. Requests grow by some tokens that nothing attended to."""
    cache = held.llm.cache
    return graph_ms(lambda: [cache.step(held.slots) for _ in range(_SIFT_STEPS)]) / _SIFT_STEPS


def run_steps(model: LoadedModel) -> tuple[float, list[StepRow], SiftRow, BookkeepingRow]:
    """Read ceiling in GB/s, and all figures. Raises SiftKVError where there is no CUDA device."""
    ceiling = read_ceiling()
    rows = [measure_step(model, kv, batch, ceiling) for kv in SETTINGS for batch in BATCHES]
    return (
        ceiling,
        rows,
        measure_sift(model, "diffkv", BATCHES[-1]),
        measure_bookkeeping(model, "diffkv", BOOKKEEPING_BATCH),
    )


def _pool(batch: int) -> int:
    """Bytes for the keys and values of `batch` requests in bf16, and their tables and windows."""
    return (4 << 30) + batch * (176 << 20)
