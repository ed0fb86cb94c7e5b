"""Which caches Hopper's selection by tensor maps serves, without a GPU."""

from __future__ import annotations

import ctypes
import os
import types

import pytest
import torch

from siftkv.errors import SiftKVError
from siftkv.kernels.cuda import compile as compiler
from siftkv.kernels.cuda import select_room
from siftkv.kernels.cuda.device import GPU
from siftkv.kernels.cuda.select_arguments import Arguments, PagedArguments
from siftkv.kernels.state import CacheState, SelectionRule
from tests import cuda_sources
from tests.cuda_sources import cache, device, select

HOPPER = GPU((9, 0), 227 * 1024)
METRICS = ("attention", "snapkv", "accumulated")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "pretended", HOPPER)


def dense(**options: object) -> CacheState:
    return cache(("bf16",), query_rows=32, num_heads=8, votes=True, **options)


def rule(metric: str, *sources: int) -> SelectionRule:
    return SelectionRule(0.9, metric, 7, True, 100, sources or (0,))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dim", [64, 128])
def test_dense_pages_that_make_tiles_are_brought_by_tensor_maps(metric: str, dim: int) -> None:
    state = dense(dim=dim)
    shape = select._shape(state, rule(metric))
    assert shape.paged
    assert 64 % state.layouts[0].tokens == 0
    assert select._shared_bytes(state, rule(metric), shape) <= HOPPER.dynamic_shared_bytes


@pytest.mark.parametrize("metric", METRICS)
def test_other_pages_are_not(metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = cache(("bf16", "k8v4"), query_rows=32, num_heads=8, votes=True)
    assert 64 % mixed.layouts[0].tokens != 0
    for state, one in ((mixed, rule(metric)), (mixed, rule(metric, 1, 0)), (dense(weights=True), rule(metric))):
        assert not select._shape(state, one).paged
    assert not select._shape(dense(dim=80), rule(metric)).paged
    monkeypatch.setattr(device, "pretended", GPU((8, 0), 163 * 1024))
    assert not select._shape(dense(), rule(metric)).paged


def test_pools_need_pages_of_sixteen_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sources, "choose_page_bytes", lambda *_, **__: 4224)
    state = dense()
    assert state.layouts[0].tokens == 8
    assert select._shape(state, rule("attention")).paged
    assert not select._shape(state, rule("snapkv")).paged


def test_a_tensor_map_comes_first_and_aligns_what_follows() -> None:
    assert PagedArguments.cache.offset == 128
    assert ctypes.sizeof(PagedArguments) % 64 == 0
    assert PagedArguments.p.offset - PagedArguments.cache.offset == Arguments.p.offset


@pytest.fixture
def _four_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    one = types.SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: one)


@pytest.mark.usefixtures("_four_blocks")
def test_room_for_buckets_is_a_part_of_the_pool_and_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = dense()
    tile = 128 * 64
    state.pages = torch.zeros(16 * 4 * 7, tile, dtype=torch.uint8)  # of which a sixteenth is seven tiles a block
    room = select_room.room_of(state, 1)
    assert room is not None
    assert room.buckets.shape == (4, 7, 128, 64)
    assert not room.taken.any()
    assert select_room.room_of(state, 5 * 64) is room
    assert select_room.room_of(state, 5 * 64 + 1) is None
    select_room.measure_exactly(state)
    assert select_room.room_of(state, 1) is None


@pytest.mark.usefixtures("_four_blocks")
def test_where_memory_is_short_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    small, state = dense(), dense()
    small.pages = torch.zeros(16 * 4 * 2, 128 * 64, dtype=torch.uint8)
    assert select_room.room_of(small, 1) is None
    state.pages = torch.zeros(16 * 4 * 7, 128 * 64, dtype=torch.uint8)

    def short(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", short)
    assert select_room.room_of(state, 1) is None


def test_buckets_are_stored_where_no_score_and_no_budget_asks_for_more() -> None:
    paged, plain = select._shape(dense(), rule("snapkv")), select._shape(dense(weights=True), rule("snapkv"))
    assert select._stores(rule("snapkv"), paged, 100)
    assert select._stores(rule("attention"), paged, 100)
    assert not select._stores(rule("accumulated"), paged, 100)
    assert not select._stores(rule("snapkv"), paged, 101)  # beyond the rule's budget
    assert not select._stores(rule("snapkv"), plain, 100)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("metric", "stored"), [*((m, False) for m in METRICS), ("attention", True), ("snapkv", True)])
@pytest.mark.parametrize("dim", [64, 128])
def test_it_compiles(metric: str, stored: bool, dim: int, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        compiler.nvrtc_version()
    except SiftKVError as error:
        pytest.skip(str(error))
    monkeypatch.setitem(os.environ, "SIFTKV_CACHE", str(tmp_path))
    assert (
        compiler.compile_cubin(select.select_source(dense(dim=dim), rule(metric), stored), "sm_90a")[:4] == b"\x7fELF"
    )
