"""The CUDA kernels for every kind of GPU, without one: they compile, fit in shared memory, and their lack is told."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

from siftkv.errors import SiftKVError
from siftkv.kernels import fused, get_kernels, reference
from siftkv.kernels.cuda import compile as compiler
from siftkv.kernels.cuda import device
from siftkv.kernels.cuda.device import GPU
from siftkv.kernels.cuda.linear_mma import LinearPlan
from siftkv.kernels.cuda.plan import Plan
from tests import cuda_sources
from tests.cuda_sources import EVERY, TYPICAL, cache, elementwise, select

KIB = 1024
GPUS = {
    "sm_80": GPU((8, 0), 163 * KIB),
    "sm_86": GPU((8, 6), 99 * KIB),
    "sm_89": GPU((8, 9), 99 * KIB),
    "sm_90": GPU((9, 0), 227 * KIB),
    "sm_100": GPU((10, 0), 227 * KIB),
    "sm_120": GPU((12, 0), 99 * KIB),
}
"""What the CUDA programming guide says of each."""

FORMATS = [("bf16",), ("k8v4",), ("k8v4", "k4v2"), ("bf16", "k8v8", "k4v2"), ("bf16", "k4v4")]


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, GPU]:
    monkeypatch.setattr(device, "pretended", GPUS[request.param])
    return request.param, GPUS[request.param]


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    """What is remembered of devices and compilers lasts a test."""
    memories = (compiler._warn_of_slowness, compiler.known_capabilities, device._gpu_of, fused._served)
    for memory in memories:
        memory.cache_clear()
    yield
    for memory in memories:
        memory.cache_clear()


def needs_compiler(arch: str) -> None:
    try:
        known = compiler.known_capabilities()
    except SiftKVError as error:
        pytest.skip(str(error))
    if divmod(int(arch.removeprefix("sm_")), 10) not in known:
        pytest.skip(f"this NVRTC has no code for {arch}")


@pytest.mark.timeout(600)
def test_every_kernel_compiles(gpu: tuple[str, GPU], tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the oldest architecture with all options, for the others with those that they are known by."""
    arch, _ = gpu
    needs_compiler(arch)
    monkeypatch.setitem(os.environ, "SIFTKV_CACHE", str(tmp_path))
    for name, source in (EVERY if arch == "sm_80" else TYPICAL).items():
        text = source()
        assert text is not None or (name, arch) == ("selecting, accumulated", "sm_86"), name
        own = select.compiled_for(arch) if name.startswith("selecting") else arch
        assert compiler.compile_cubin(text or "", own)[:4] == b"\x7fELF", name


def test_ptx_is_made_for_gpus_newer_than_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiler("sm_90")
    monkeypatch.setattr(device, "pretended", GPUS["sm_90"])
    text = compiler.compile_cubin(cuda_sources.fused(torch.bfloat16), "compute_90").rstrip(b"\0").decode()
    assert ".target sm_90" in text


@pytest.mark.parametrize("formats", FORMATS, ids="+".join)
@pytest.mark.parametrize(("dim", "group"), [(64, 7), (128, 4), (128, 16), (256, 4)])
def test_attention_fits_into_shared_memory(
    gpu: tuple[str, GPU], formats: tuple[str, ...], dim: int, group: int
) -> None:
    plan = Plan(cache(formats, dim), group)
    assert 40 * KIB < plan.shared_bytes <= gpu[1].dynamic_shared_bytes
    assert plan.stages == 2
    assert plan.grid_warps == plan.teams * plan.team_warps


def test_linear_layers_fit_into_shared_memory(gpu: tuple[str, GPU]) -> None:
    stages = elementwise.linear_stages(gpu[1])
    assert stages == {227: 6, 163: 5, 99: 3}[gpu[1].block_shared_bytes // KIB]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("columns", "inputs"), [(8, 4096), (16, 4096), (16, 896), (8, 14336), (16, 14336)])
def test_linear_layers_on_tensor_cores_compile(
    gpu: tuple[str, GPU], columns: int, inputs: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch, kind = gpu
    plan = LinearPlan.of(columns, inputs, kind)
    if plan is None:  # the library multiplies
        assert kind.capability < (9, 0) or (kind.block_shared_bytes < 128 * KIB and inputs == 14336)
        return
    assert plan.stages(kind) >= 2
    assert plan.shared_bytes(kind) <= kind.dynamic_shared_bytes
    assert plan.grid(14336, 33) <= 33 * plan.cluster
    needs_compiler(arch)
    monkeypatch.setitem(os.environ, "SIFTKV_CACHE", str(tmp_path))
    assert compiler.compile_cubin(plan.source(torch.bfloat16, kind), arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("metric", ["attention", "snapkv", "accumulated"])
def test_selections_take_what_shared_memory_there_is(gpu: tuple[str, GPU], metric: str) -> None:
    arch, kind = gpu
    state = cache(("bf16", "k8v4"), query_rows=32, num_heads=8, votes=True)
    rule = cuda_sources.SelectionRule(0.9, metric, 7, True, 100, (1, 0))
    served = select.selects(state, rule)
    assert served == (kind.block_shared_bytes > 99 * KIB or metric != "accumulated")
    if served:
        shape = select._shape(state, rule)
        best = {"sm_90": select._HOPPER[metric == "snapkv"], "sm_100": select._PLAIN[0]}
        assert shape == best.get(arch, shape)
        assert select._shared_bytes(state, rule, shape) <= kind.dynamic_shared_bytes


@pytest.mark.parametrize(
    ("capability", "known", "expected"),
    [
        ((8, 6), ((8, 0), (8, 6), (9, 0)), "sm_86"),
        ((8, 7), ((8, 0), (8, 6), (9, 0)), "compute_86"),
        ((12, 1), ((8, 0), (9, 0), (12, 0)), "compute_120"),
        ((10, 0), ((7, 5), (8, 0), (9, 0)), "compute_90"),
    ],
)
def test_architectures_that_the_compiler_does_not_know_run_what_it_knows(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], known: tuple[tuple[int, int], ...], expected: str
) -> None:
    monkeypatch.setattr(device, "pretended", GPU(capability, 99 * KIB))
    monkeypatch.setattr(compiler, "known_capabilities", lambda: known)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert compiler.architecture(torch.device("cuda")) == expected


def choose_twice() -> object:
    for where in ("cuda", "cuda:0"):
        chosen = get_kernels("auto", where, torch.bfloat16)
    assert get_kernels("auto", "cuda", torch.float32) is reference
    return chosen


def test_an_old_gpu_runs_the_reference_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "pretended", GPU((7, 5), 64 * KIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with caplog.at_level(logging.WARNING):
        assert choose_twice() is reference
    assert len(caplog.messages) == 1
    assert "8.0 (Ampere) or later, and Tesla T4 has 7.5" in caplog.messages[0]
    assert "many times slower" in caplog.messages[0]


def test_without_a_compiler_the_reference_runs_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "pretended", GPU((9, 0), 227 * KIB))
    compiler._nvrtc.cache_clear()
    monkeypatch.setattr(compiler, "_candidates", lambda: iter(["/nowhere/libnvrtc.so"]))
    with caplog.at_level(logging.WARNING):
        assert choose_twice() is reference
        assert not fused._served(torch.device("cuda", 0))
    compiler._nvrtc.cache_clear()
    assert len(caplog.messages) == 1
    assert "install the nvidia-cuda-nvrtc wheel" in caplog.messages[0]


def test_a_served_gpu_runs_its_kernels_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "pretended", GPU((8, 6), 99 * KIB))
    monkeypatch.setattr(compiler, "known_capabilities", lambda: ((8, 0), (8, 6)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    from siftkv.kernels import cuda

    assert get_kernels("auto", "cuda", torch.float16) is cuda
    assert not caplog.messages
