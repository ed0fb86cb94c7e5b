"""What one trigger of Hard-KV takes on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from siftkv.benchmarks.standing import stand
from siftkv.engine.llm import LLM
from siftkv.engine.together import select_together
from siftkv.kernels import cuda
from siftkv.kernels.state import UNLIMITED, CacheState, SelectionRule, table_column
from siftkv.policies import Policy
from siftkv.policies.hardkv import HardKV

CONTEXT = 8192
METRICS = ("attention", "snapkv", "accumulated", "rkv")

_STAYS = 0.25
_REPEATS = 5
_HEAD_START = 1 << 22
"""Clock cycles that the device waits before it is measured, so that the host is ahead of it."""


@dataclass(frozen=True)
class TriggerRow:
    """A trigger of one request of `CONTEXT` tokens in every head, of which a quarter stays. Milliseconds on the device.

    snapshot_ms: copies of what decode steps change; select_ms: votes; rewrite_ms: survivors become contiguous;
    trigger_ms: all three, one after another.
    """

    metric: str
    snapshot_ms: float
    select_ms: float
    rewrite_ms: float
    trigger_ms: float


def device_ms(work: Callable[[], object]) -> float:
    """Milliseconds on the device from the first to the last operation that `work` launches, the host being ahead."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _pages_of(state: CacheState, slot: int) -> Tensor:
    """Numbers of the pages of a request whose tokens are all in the first tier, as many in every head."""
    count = -(-int(state.lengths[slot, 0, 0, 0]) // state.layouts[0].tokens)
    nth = torch.arange(count, device=state.pages.device)
    return state.page_table[slot][:, :, 0, table_column(state.width, 0, nth)].flatten().long()


@torch.inference_mode()
def trigger_cost(llm: LLM, policy: Policy, metric: str) -> TriggerRow:
    """One request alone. A metric that no kernel serves is selected by as the engine does it then, by PyTorch's
    operations over many heads at once.
    """
    state, spec = llm.cache.state, llm.cache.spec
    near = policy.window + policy.sinks
    shape = (spec.num_layers, spec.num_kv_heads)
    seen = torch.full((1,), CONTEXT, device=state.seen.device)
    [slot] = stand(llm, policy, torch.full((1, *shape, 1), CONTEXT - near, device=seen.device), seen)
    rule = SelectionRule(0.9, metric, 7, True, UNLIMITED, (0,))
    by_operations = HardKV(p=rule.p, metric=metric, window=policy.window, sinks=policy.sinks)
    mask = (torch.rand(*shape, CONTEXT - near, device=seen.device) < _STAYS).to(torch.uint8)
    names = ("lengths", "page_table", "counters", "free_ring")
    kept = {name: getattr(state, name).clone() for name in names}
    own = _pages_of(state, slot)
    content = state.pages[own]

    def select() -> None:
        before = cuda.snapshot(state, slot)
        if cuda.selects(before, rule):
            cuda.select(before, 0, rule, longest=CONTEXT - near)
        else:
            select_together(before, 0, by_operations, rule.sources, CONTEXT, UNLIMITED)

    def rewrite() -> None:
        cuda.rewrite(state, slot, mask, 0, (0,), lengths_at)

    def both() -> None:
        select()
        rewrite()

    def time(work: Callable[[], object]) -> float:
        found = []
        for _ in range(_REPEATS + 1):
            found.append(device_ms(work))
            for name, tensor in kept.items():
                getattr(state, name).copy_(tensor)
            state.pages[own] = content
        return median(found[1:])

    lengths_at = state.lengths[slot].clone()
    snapshot_ms = time(lambda: cuda.snapshot(state, slot))
    selection, rewriting, whole = time(select), time(rewrite), time(both)
    llm.cache.release([slot])
    return TriggerRow(metric, snapshot_ms, selection - snapshot_ms, rewriting, whole)
