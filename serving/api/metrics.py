"""Counters for Prometheus. One registry per app, so that two apps in a process do not mix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.engine.types import Engine, Report

_TTFT_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_MS_BUCKETS = (1, 5, 20, 50, 100, 200, 500, 1000, 2000, 5000, 20000)


class Metrics:
    """All that the API counts."""

    def __init__(self, count_jobs: Callable[[], Mapping[str, int]], engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "preread_http_requests",
            "Requests by route.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.in_progress = Gauge("preread_http_in_progress", "Requests under way, streams included.", registry=self.registry)
        self.tokens = Counter(
            "preread_prompt_tokens", "Prompt tokens by origin.", ("origin",), registry=self.registry
        )
        self.completion = Counter("preread_completion_tokens", "Tokens generated.", registry=self.registry)
        self.ttft = Histogram(
            "preread_ttft_seconds", "Request to first text.", buckets=_TTFT_BUCKETS, registry=self.registry
        )
        self.stages = Histogram(
            "preread_stage_ms",
            "Milliseconds by stage.",
            ("stage",),
            buckets=_MS_BUCKETS,
            registry=self.registry,
        )
        self.misses = Counter(
            "preread_kv_not_reused",
            "Chunks whose stored KV was not used.",
            ("reason",),
            registry=self.registry,
        )
        self.bytes = Counter("preread_kv_bytes_fetched", "Bytes of stored KV read.", registry=self.registry)
        self.registry.register(_Jobs(count_jobs))
        self.registry.register(_Quality(engine))

    def note_answer(self, report: Report, completion_tokens: int) -> None:
        """Count one finished answer."""
        self.tokens.labels("reused").inc(report.tokens_reused)
        self.tokens.labels("recomputed").inc(report.tokens_recomputed)
        self.tokens.labels("computed").inc(report.tokens_computed)
        self.completion.inc(completion_tokens)
        self.bytes.inc(report.bytes_fetched)
        for miss in report.not_reused:
            self.misses.labels(miss.reason).inc()
        for stage, ms in report.ms.items():
            self.stages.labels(stage).observe(ms)


class _Jobs(Collector):
    """Jobs by status, counted when asked."""

    def __init__(self, count_jobs: Callable[[], Mapping[str, int]]) -> None:
        self._count_jobs = count_jobs

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("preread_jobs", "Jobs by status.", labels=("status",))
        for status, count in self._count_jobs().items():
            family.add_metric((status,), count)
        yield family


class _Quality(Collector):
    """Whether the model is blended, and how far sampled answers were from full prefill."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        reason = self._engine.full_prefill_reason
        off = GaugeMetricFamily("preread_full_prefill_only", "1: the model is not blended.", labels=("reason",))
        off.add_metric((reason or "",), float(reason is not None))
        yield off
        answers, kl = self._engine.canary_totals()
        yield CounterMetricFamily("preread_canary_answers", "Answers compared with full prefill.", answers)
        yield CounterMetricFamily("preread_canary_kl", "Sum of their KL divergence from full prefill, nats per token.", kl)
