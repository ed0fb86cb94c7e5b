"""What the server shows of its engine: figures against the cache itself, the exposition, and the routes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from siftkv import LLM, SamplingParams, parse_policy
from siftkv.engine.fates import DROPPED, token_fates, window_fate
from siftkv.engine.report import kv_report
from siftkv.errors import RequestError
from siftkv.server import stats
from siftkv.server.fate_map import fate_map, legend
from siftkv.server.metrics import ServerMetrics, policy_name
from tests.tiny import prompt, tiny_llm

DIFFKV = "diffkv:alpha_high=1.5,alpha_low=0.9,window=8,sinks=2"


def run(llm: LLM, kvs: list[str], steps: int = 20, length: int = 90) -> list[str]:
    params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
    ids = [llm.engine.add(prompt(length, seed=i), params, parse_policy(kv)) for i, kv in enumerate(kvs)]
    for _ in range(steps):
        llm.engine.step()
    return ids


def mixed() -> tuple[LLM, list[str]]:
    llm = tiny_llm(DIFFKV, formats=["fp32"], max_num_seqs=3)
    return llm, run(llm, [DIFFKV, "full", DIFFKV, "full"])


class TestCollect:
    def test_counts_and_bytes_agree_with_the_cache(self) -> None:
        llm, ids = mixed()
        found = stats.collect(llm)
        assert (found["running"], found["waiting"], found["swapped"]) == (3, 1, 0)
        assert [r["id"] for r in found["requests"]] == ids
        assert [r["state"] for r in found["requests"]] == ["running"] * 3 + ["waiting"]
        assert found["requests"][0]["output_tokens"] == 20
        assert sum(found["pages"]["by_tier"].values()) == found["pages"]["total"] - found["pages"]["free"] > 0
        assert found["free_list"]["level"] == found["pages"]["free"] == llm.cache.free_pages
        assert sum(found["memory"].values()) == found["usage"]["allocated"]
        assert found["integrity"]["ok"]
        assert sum(found["policies"].values()) == 4
        json.dumps(found)

    def test_batch_figures_are_those_of_the_reports(self) -> None:
        llm, _ = mixed()
        found = stats.collect(llm)
        running = llm.engine.scheduler.running
        reports = [kv_report(llm.cache, s.slot, s.policy.name) for s in running]
        assert found["physical_bytes"] == sum(r.physical_bytes for r in reports)
        assert found["ratio"] == pytest.approx(found["physical_bytes"] / sum(r.bf16_bytes for r in reports))
        heads = torch.tensor([r.per_head_tokens for r in reports]).sum(0)  # [L, H, tiers]
        seen = sum(r.tokens_seen for r in reports)
        assert found["tokens_by_tier"]["names"] == list(reports[0].tokens_by_tier)
        assert found["tokens_by_tier"]["layers"] == heads.sum(1).tolist()
        share = torch.tensor(found["kept_share"])
        torch.testing.assert_close(share, 1 - heads[..., -1] / seen, atol=1e-4, rtol=0)
        assert 0 < share.min() < 1
        live = sum(sum(r.tokens_by_tier.values()) - r.tokens_by_tier["dropped"] for r in reports)
        assert found["bytes_per_live_token"] == pytest.approx(found["physical_bytes"] / live)

    def test_an_idle_engine(self) -> None:
        llm = tiny_llm()
        found = stats.collect(llm)
        assert found["requests"] == []
        assert found["ratio"] == found["bytes_per_live_token"] == 0
        assert set(found["pages"]["by_tier"].values()) == {0}
        assert sum(found["memory"].values()) == found["usage"]["allocated"]

    def test_a_lost_page_is_told_for_good(self) -> None:
        llm = tiny_llm()
        assert stats.collect(llm)["integrity"]["ok"]
        llm.cache.state.counters[0] += 1
        found = stats.collect(llm)["integrity"]
        assert not found["ok"]
        assert "1 pages are neither free nor" in found["message"]
        llm.cache.state.counters[0] -= 1
        assert not stats.collect(llm)["integrity"]["ok"]

    def test_a_complete_check_finds_what_counts_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        llm = tiny_llm()
        monkeypatch.setattr(stats, "INTEGRITY_SECONDS", 0.0)
        llm.cache.state.free_ring[0] = llm.cache.state.free_ring[1]
        found = stats.collect(llm)["integrity"]
        assert not found["ok"]
        assert "more than once" in found["message"]


class TestInspect:
    def test_a_running_request(self) -> None:
        llm, ids = mixed()
        found = stats.inspect_request(llm, ids[0])
        report = kv_report(llm.cache, llm.engine.scheduler.running[0].slot, "")
        assert found["physical_bytes"] == report.physical_bytes
        counts = torch.tensor(report.per_head_tokens)
        assert found["tokens_by_tier"]["layers"] == counts.sum(1).tolist()
        torch.testing.assert_close(
            torch.tensor(found["kept_share"]), 1 - counts[..., -1] / report.tokens_seen, atol=1e-4, rtol=0
        )
        assert all(len(head) == report.tokens_seen for layer in found["fates"] for head in layer)
        json.dumps(found)

    def test_a_waiting_request_holds_nothing(self) -> None:
        llm, ids = mixed()
        found = stats.inspect_request(llm, ids[3])
        assert found["state"] == "waiting"
        assert "fates" not in found

    def test_an_unknown_request(self) -> None:
        with pytest.raises(RequestError, match="'nobody'"):
            stats.inspect_request(tiny_llm(), "nobody")

    @pytest.mark.parametrize("kv", [DIFFKV, "full:window=8", "uniform:k4v4,window=8,sinks=2", "diffkv:window=8"])
    def test_fates_are_those_read_token_by_token(self, kv: str) -> None:
        llm = tiny_llm(kv)
        run(llm, [kv], steps=30)
        slot = llm.engine.scheduler.running[0].slot
        letters = {str(i): i for i in range(len(llm.cache.spec.tiers))} | {"w": window_fate(llm.cache), ".": DROPPED}
        for layer, heads in enumerate(fate_map(llm.cache, slot)):
            for head, text in enumerate(heads):
                assert [letters[c] for c in text] == token_fates(llm.cache, slot, layer, head).tolist()
        assert set(letters) <= set(legend(llm.cache))

    def test_tokens_that_cannot_be_told_apart_are_unknown(self) -> None:
        kv = "uniform:k4v4,window=8,sinks=2"
        llm = tiny_llm(kv, check_integrity=False)
        run(llm, [kv])
        slot = llm.engine.scheduler.running[0].slot
        llm.cache.state.lengths[slot, 0, 0, 0] -= 1
        found = fate_map(llm.cache, slot)
        assert set(found[0][0]) == {"?", "w"}
        assert set(found[0][1]) == {"0", "w"}


def samples(metrics: ServerMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = text_string_to_metric_families(body.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


class TestServerMetrics:
    def test_a_life_of_a_request(self) -> None:
        metrics = ServerMetrics()
        metrics.arrived(object())
        metrics.first_token(0.3)
        metrics.further_tokens([0.02, 0.04])
        metrics.preempted(2)
        metrics.preempted(0)
        metrics.finished("length", 0.5, 0.1, 12, 3, "diffkv:alpha_low=0.02")
        metrics.cancelled()
        found = samples(metrics)
        expected: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
            ("siftkv_requests_total", ()): 1,
            ("siftkv_generation_tokens_total", ()): 3,
            ("siftkv_prompt_tokens_total", ()): 12,
            ("siftkv_num_preemptions_total", ()): 2,
            ("siftkv_request_cancellations_total", ()): 1,
            ("siftkv_request_success_total", (("finished_reason", "length"), ("policy", "diffkv"))): 1,
            ("siftkv_time_to_first_token_seconds_sum", ()): 0.3,
            ("siftkv_inter_token_latency_seconds_count", ()): 2,
            ("siftkv_inter_token_latency_seconds_sum", ()): 0.06,
            ("siftkv_time_per_output_token_seconds_count", ()): 2,
            ("siftkv_e2e_request_latency_seconds_sum", ()): 0.5,
            ("siftkv_request_queue_time_seconds_sum", ()): 0.1,
        }
        assert {key: found[key] for key in expected} == pytest.approx(expected)
        assert metrics.counters()["generation_tokens"] == 3
        assert metrics.counters()["finished"] == 1

    def test_what_the_cache_holds(self) -> None:
        llm, _ = mixed()
        metrics, collected = ServerMetrics(), stats.collect(llm)
        metrics.step(collected)
        found = samples(metrics)
        assert found["siftkv_num_requests_running", ()] == 3
        assert found["siftkv_num_requests_waiting", ()] == 1
        assert found["siftkv_num_requests_by_policy", (("policy", "full"),)] == 2
        pages = llm.cache.usage()
        assert found["siftkv_kv_cache_usage_perc", ()] == pytest.approx(pages.pages_used / pages.pages_total)
        by_tier = [value for (name, _), value in found.items() if name == "siftkv_kv_pages"]
        assert sum(by_tier) == pages.pages_used
        assert found["siftkv_kv_free_list_pages", ()] == pages.pages_free
        assert found["siftkv_kv_ratio_to_bf16", ()] == pytest.approx(collected["ratio"])
        assert found["siftkv_kv_physical_bytes_per_live_token", ()] == collected["bytes_per_live_token"]
        assert found["siftkv_kv_integrity_ok", ()] == 1
        memory = [value for (name, _), value in found.items() if name == "siftkv_kv_memory_bytes"]
        assert sum(memory) == pages.allocated
        for layer in range(llm.cache.spec.num_layers):
            assert found["siftkv_kv_kept_tokens_count", (("layer", str(layer)),)] == 2
            assert found["siftkv_kv_kept_tokens_sum", (("layer", str(layer)),)] == pytest.approx(
                sum(collected["kept_tokens"][layer])
            )

    def test_the_same_sample_counts_once(self) -> None:
        llm, _ = mixed()
        metrics, collected = ServerMetrics(), stats.collect(llm)
        metrics.step(collected)
        metrics.step(dict(collected))
        assert samples(metrics)["siftkv_kv_kept_tokens_count", (("layer", "0"),)] == 2

    def test_a_policy_that_is_gone_is_not_shown(self) -> None:
        llm, ids = mixed()
        metrics = ServerMetrics()
        metrics.step(stats.collect(llm))
        for request_id in ids:
            llm.engine.abort(request_id)
        metrics.step(stats.collect(llm))
        found = samples(metrics)
        assert not [key for key in found if key[0] == "siftkv_num_requests_by_policy"]
        assert found["siftkv_num_requests_running", ()] == 0

    def test_two_servers_in_one_process(self) -> None:
        ServerMetrics().arrived(None)
        assert samples(ServerMetrics())["siftkv_requests_total", ()] == 0

    def test_settings_are_no_labels(self) -> None:
        assert policy_name("diffkv:alpha_high=1,alpha_low=0.02") == "diffkv"
        assert policy_name("full") == "full"


class FakeWorker:
    """A worker without a thread."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.metrics, self.state = llm, ServerMetrics(), "ready"

    def snapshot(self) -> dict[str, Any]:
        return stats.collect(self.llm)

    async def inspect(self, request_id: str) -> dict[str, Any]:
        return stats.inspect_request(self.llm, request_id)


class TestRoutes:
    @pytest.fixture
    def client(self) -> TestClient:
        llm, self.ids = mixed()
        app = FastAPI()
        app.include_router(stats.router(FakeWorker(llm)))
        return TestClient(app)

    def test_snapshot(self, client: TestClient) -> None:
        found = client.get("/api/snapshot").json()
        assert found["running"] == 3
        assert found["counters"]["generation_tokens"] == 0
        assert found["now"] >= found["time"]

    def test_inspect(self, client: TestClient) -> None:
        found = client.get(f"/api/requests/{self.ids[0]}")
        assert found.status_code == 200
        assert len(found.json()["fates"]) == 2
        assert client.get("/api/requests/nobody").json() == {"id": "nobody", "state": "ended"}
