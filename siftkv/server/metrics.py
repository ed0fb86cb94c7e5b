"""Prometheus metrics: vLLM's names behind `siftkv_` where it has the same quantity, and the cache's own beside them."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from siftkv.server.histogram import BatchHistogram

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PER_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_REQUEST = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_KEPT = tuple(2**i for i in range(4, 18))


class ServerMetrics:
    """Everything that `/metrics` shows. Times in seconds, sizes in bytes. Safe to call from several threads.

    registry: where to register; one of its own unless given.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        if registry is None:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
        self._sampled: object = None
        self._totals: Tally[str] = Tally()
        self._requests()
        self._engine()
        self._cache()

    def _requests(self) -> None:
        self.requests = self._counter("requests", "Requests that arrived.")
        self.success = self._counter(
            "request_success", "Requests that ended, by reason.", ("finished_reason", "policy")
        )
        self.cancellations = self._counter("request_cancellations", "Requests whose client went away.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        told = {
            "siftkv_inter_token_latency_seconds": "Between two tokens of a request.",
            "siftkv_time_per_output_token_seconds": "inter_token_latency_seconds by its older name.",
        }
        self.itl = BatchHistogram(told, _PER_TOKEN)
        self.registry.register(self.itl)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _REQUEST)
        self.queue = self._histogram("request_queue_time_seconds", "From arrival to the first pass.", _REQUEST)
        self.prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_length = self._histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)

    def _engine(self) -> None:
        self.running = self._gauge("num_requests_running", "Completions in the running batch.")
        self.waiting = self._gauge("num_requests_waiting", "Completions that wait for pages or a slot.")
        self.swapped = self._gauge("num_requests_swapped", "Preempted completions in host memory.")
        self.preemptions = self._counter("num_preemptions", "Times that a completion gave its pages up for others.")
        self.policy_mix = self._gauge("num_requests_by_policy", "Live completions by policy.", ("policy",))

    def _cache(self) -> None:
        self.usage = self._gauge("kv_cache_usage_perc", "Share of the pool's pages that is held, 0 to 1.")
        self.pages = self._gauge("kv_pages", "Pages held, by tier.", ("tier",))
        self.pool_pages = self._gauge("kv_pool_pages", "Pages of the pool.")
        self.free_list = self._gauge("kv_free_list_pages", "Pages on the free list.")
        self.page_bytes = self._gauge("kv_page_bytes", "Bytes of a page.")
        self.memory = self._gauge("kv_memory_bytes", "Bytes of the whole cache, by what holds them.", ("part",))
        self.bytes_per_token = self._gauge(
            "kv_physical_bytes_per_live_token", "Physical bytes an entry that is kept takes, running batch."
        )
        self.ratio = self._gauge("kv_ratio_to_bf16", "Physical bytes of the running batch by those of bf16.")
        self.tokens = self._gauge("kv_tokens", "Entries of the running batch, by tier and layer.", ("tier", "layer"))
        self.kept = self._histogram(
            "kv_kept_tokens", "Tokens that a head keeps a request, sampled while requests run.", _KEPT, ("layer",)
        )
        self.integrity = self._gauge("kv_integrity_ok", "1 while the cache's bookkeeping is whole, 0 after a fault.")
        self.integrity.set(1)

    def _counter(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"siftkv_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"siftkv_{name}", about, labels, registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"siftkv_{name}", about, labels, buckets=buckets, registry=self.registry)

    def _count(self, counter: Counter, name: str, amount: int = 1) -> None:
        counter.inc(amount)
        self._totals[name] += amount

    def arrived(self, request: object) -> None:
        """A request was accepted."""
        self._count(self.requests, "requests")

    def first_token(self, seconds: float) -> None:
        """The first token of a completion, `seconds` after its arrival."""
        self._count(self.generation_tokens, "generation_tokens")
        self.ttft.observe(max(0.0, seconds))

    def further_tokens(self, seconds_since_last: Sequence[float]) -> None:
        """Further tokens of completions, one each."""
        self._count(self.generation_tokens, "generation_tokens", len(seconds_since_last))
        self.itl.observe(seconds_since_last)

    def finished(
        self, reason: str, e2e_s: float, queue_s: float, prompt_tokens: int, output_tokens: int, kv_name: str
    ) -> None:
        """A completion ended. reason: `stop`, `length`, `abort`. kv_name: its `kv` setting, of which the policy's name
        becomes a label: settings are the client's to choose, so they would make series without end.
        """
        self.success.labels(reason, policy_name(kv_name)).inc()
        self._totals["finished"] += 1
        self._count(self.prompt_tokens, "prompt_tokens", prompt_tokens)
        self.e2e.observe(max(0.0, e2e_s))
        self.queue.observe(max(0.0, queue_s))
        self.prompt_length.observe(prompt_tokens)
        self.output_length.observe(output_tokens)

    def cancelled(self) -> None:
        """A client went away before its request had ended."""
        self._count(self.cancellations, "cancellations")

    def preempted(self, n: int) -> None:
        """`n` completions gave their pages up since the last call."""
        if n > 0:
            self._count(self.preemptions, "preemptions", n)

    def step(self, collected: dict[str, Any]) -> None:
        """Take over what `siftkv.server.stats.collect` found; the same result twice counts once."""
        if collected and collected["time"] != self._sampled:
            self._sampled = collected["time"]
            self._set_engine(collected)
            self._set_cache(collected)

    def _set_engine(self, collected: dict[str, Any]) -> None:
        self.running.set(collected["running"])
        self.waiting.set(collected["waiting"])
        self.swapped.set(collected["swapped"])
        mix: Tally[str] = Tally()
        for kv, count in collected["policies"].items():
            mix[policy_name(kv)] += count
        self.policy_mix.clear()
        for policy, count in mix.items():
            self.policy_mix.labels(policy).set(count)

    def _set_cache(self, collected: dict[str, Any]) -> None:
        pages, tiers = collected["pages"], collected["tokens_by_tier"]
        self.usage.set(1 - pages["free"] / pages["total"])
        self.pool_pages.set(pages["total"])
        self.free_list.set(collected["free_list"]["level"])
        self.page_bytes.set(collected["usage"]["page_bytes"])
        self.bytes_per_token.set(collected["bytes_per_live_token"])
        self.ratio.set(collected["ratio"])
        self.integrity.set(1 if collected["integrity"]["ok"] else 0)
        for tier, count in pages["by_tier"].items():
            self.pages.labels(tier).set(count)
        for part, size in collected["memory"].items():
            self.memory.labels(part).set(size)
        for layer, counts in enumerate(tiers["layers"]):
            for tier, count in zip(tiers["names"], counts, strict=True):
                self.tokens.labels(tier, str(layer)).set(count)
        if collected["running"]:
            for layer, heads in enumerate(collected["kept_tokens"]):
                histogram = self.kept.labels(str(layer))
                for kept in heads:
                    histogram.observe(kept)

    def counters(self) -> dict[str, int]:
        """Totals since the start, for rates on the dashboard."""
        names = ("requests", "finished", "cancellations", "preemptions", "prompt_tokens", "generation_tokens")
        return {name: self._totals[name] for name in names}

    def render(self) -> tuple[bytes, str]:
        """The exposition, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def policy_name(kv: str) -> str:
    """`diffkv` of `diffkv:alpha_low=0.02`."""
    return kv.partition(":")[0]
