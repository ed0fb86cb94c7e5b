"""The kernels as other GPUs run them: Ampere's and Ada's code and shared memory, and that of small newer ones.

Code for an older GPU is PTX here, which the present one's driver compiles: it would refuse an instruction that the
older one lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from siftkv.attention import prefill
from siftkv.kernels.cuda import compile as compiler
from siftkv.kernels.cuda import device
from siftkv.kernels.cuda.device import GPU
from siftkv.kernels.cuda.select import selects
from tests.gpu import test_cuda_attention as attention
from tests.gpu import test_cuda_fused as fused
from tests.gpu import test_cuda_prompt as prompt
from tests.gpu import test_cuda_rewrite as rewrite
from tests.gpu import test_cuda_select as select
from tests.gpu import test_cuda_sift as sift
from tests.gpu import test_gpu_engine as engine
from tests.gpu import test_gpu_hardkv as hardkv_engine
from tests.gpu.hardkv_helpers import hard_cache, rule_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPUS = {
    "compute_80": GPU((8, 0), 163 * 1024),
    "compute_86": GPU((8, 6), 99 * 1024),
    "little shared memory": GPU((9, 0), 99 * 1024),
}


def forget_kernels() -> None:
    """Whatever is compiled is compiled anew."""
    for name, module in list(sys.modules.items()):
        if name.startswith("siftkv.kernels.cuda"):
            for held in list(vars(module).values()):
                if hasattr(held, "cache_clear"):
                    held.cache_clear()


@pytest.fixture(params=GPUS)
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GPU]:
    gpu = GPUS[request.param]
    if torch.cuda.get_device_capability() < max(gpu.capability, (8, 0)):
        pytest.skip("this GPU is older than the one that it is to be taken for")
    monkeypatch.setattr(device, "pretended", gpu)
    monkeypatch.setattr(prefill, "_cudnn_gives_lse", lambda q: False)
    forget_kernels()
    yield gpu
    monkeypatch.undo()
    forget_kernels()


CASES: dict[str, Callable[[], None]] = {
    "attention, three formats": lambda: attention.test_groups_and_formats(8, ("bf16", "k8v8", "k4v2")),
    "attention, two formats": lambda: attention.test_groups_and_formats(4, ("k8v4", "k4v2")),
    "attention, fp16": lambda: attention.test_other_formats(("fp16", "k8v2", "k4v8", "k4v1")),
    "attention, key bias": lambda: attention.test_conditioning_and_bias("full", 7),
    "attention, head_dim 256": lambda: attention.test_head_dims(256),
    "attention, graph": lambda: attention.test_captured_in_a_graph(),
    "attention, log-weights, skipped pages": lambda: (
        rewrite.test_attention_with_log_weights_skipped_pages_and_a_query_ring(
            ("bf16", "k8v4"), {"weights": True, "skips": True, "bias": True}
        )
    ),
    "sifting": lambda: sift.test_sift_steps_are_the_same_to_the_bit(("bf16", "k8v4c", "k4v2c"), 128, torch.bfloat16),
    "sifting, graph": lambda: sift.test_steps_replay_from_a_graph(),
    "appending": lambda: sift.test_append_tokens_is_the_same_to_the_bit(("k8v4", "k4v4", "k4v2"), 1.0),
    "prompts": lambda: prompt.test_many_short_prompts_take_pages_in_order(),
    "importance": lambda: prompt.test_importance_agrees(1500, 2, 4, 128, torch.bfloat16, 1),
    "rewriting": lambda: rewrite.test_a_rewrite_is_the_generic_one(("bf16", "k8v4"), True, True),
    "rewriting between steps": (
        lambda: rewrite.test_a_captured_step_goes_on_after_a_rewrite_and_tokens_that_came_meanwhile_stay()
    ),
    "linear layers": lambda: fused.test_linear_layers_of_few_rows(2, 14336, 130, torch.bfloat16),
    "linear layers, odd sizes": lambda: fused.test_linear_layers_of_few_rows(1, 1544, 6, torch.float16),
    "projection and rotation": lambda: fused.test_projection_and_rotation_in_one(80, 2, torch.float16),
    "fused, graph": lambda: fused.test_a_graph_replays_them_in_order(),
    "linear layers, graph": lambda: fused.test_early_launches_in_a_graph_keep_their_order(2, 1024, 30),
    "engine, graphs and eager": lambda: engine.test_graphs_and_eager_steps_give_the_same_tokens(),
    "engine, Hard-KV": lambda: hardkv_engine.test_graphs_and_eager_steps_trigger_alike(",format=k8v4"),
}
"""Tests of the kernels that hold for any GPU."""


@pytest.mark.parametrize("case", CASES)
def test_what_holds_on_any_gpu(other: GPU, case: str) -> None:
    CASES[case]()


@pytest.mark.parametrize("case", ["plain", "quantised, weights, key bias"])
@pytest.mark.parametrize(("metric", "p"), [("attention", 0.9), ("snapkv", 0.9), ("accumulated", 0.8)])
def test_selections(other: GPU, metric: str, p: float, case: str) -> None:
    if metric == "accumulated" and other.block_shared_bytes < 128 * 1024:
        cache = hard_cache(lengths=(100,))
        assert not selects(cache.state, rule_for(cache, metric, p))
        return
    select.test_votes_lie_between_what_the_exact_rule_needs_and_its_stated_excess(case, metric, p)


def test_code_is_for_the_other_gpu(other: GPU) -> None:
    here = torch.device("cuda", 0)
    expected = f"compute_{other.capability[0]}{other.capability[1]}"
    if other.capability == torch.cuda.get_device_capability():
        expected = expected.replace("compute", "sm")
    assert compiler.architecture(here) == expected
    assert device.gpu_of(here).starts_early == (other.capability >= (9, 0))
