"""The operator's view for Prometheus: the policy file, and by tenant and corpus what lies where, costs and saves.

Read from the catalogue, so every process shows the same figures: aggregate them with max, not with sum. Tiers in memory
are the process's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.economics import balance, month_cost
from serving.placement import Placement
from storage.catalogue import holdings
from storage.catalogue.engine import Catalogue
from storage.catalogue.holdings import Holding, Owner

FRESH_SECONDS = 60.0  # the sums over all chunks of all tenants are read at most this often
OWNER = ("tenant", "corpus")


class EconomyMetrics(Collector):
    def __init__(self, catalogue: Catalogue, placement: Placement) -> None:
        self._catalogue, self._placement = catalogue, placement
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._stored: dict[Owner, Holding] = {}

    def describe(self) -> Iterable[Metric]:
        return []  # nothing is read while the app is built

    def collect(self) -> Iterable[Metric]:
        file = self._placement.policy
        yield _gauge("preread_policy_file_broken", "1: the file has mistakes, the version before it is in force.", file.error)
        yield CounterMetricFamily("preread_policy_reloads", "New versions put in force.", file.reloads)
        yield CounterMetricFamily("preread_policy_failures", "Versions refused.", file.failures)
        yield from self._held()
        yield from self._balances()

    def _held(self) -> Iterable[Metric]:
        size = GaugeMetricFamily("preread_stored_bytes", "KV by tier.", labels=(*OWNER, "tier"))
        cost = GaugeMetricFamily("preread_stored_money_per_month", "What it costs to leave it there.", labels=OWNER)
        rates = self._placement.policy.current().rates
        tiers = {"object": self._in_store()}
        with self._catalogue.read() as session:
            for tier in self._placement.tiers.tiers:
                sizes = {key: each.bytes for key, each in self._placement.tiers.held(tier).items()}
                tiers[tier] = holdings.of_copies(session, sizes)
        for owner in tiers["object"]:
            held = {tier: found.get(owner, Holding()).bytes for tier, found in tiers.items()}
            for tier, bytes_ in held.items():
                size.add_metric((*owner, tier), bytes_)
            cost.add_metric(owner, month_cost(held, rates))
        yield from (size, cost)

    def _in_store(self) -> dict[Owner, Holding]:
        with self._lock:
            if time.monotonic() - self._read_at > FRESH_SECONDS:
                with self._catalogue.read() as session:
                    self._stored = holdings.stored(session)
                self._read_at = time.monotonic()
            return self._stored

    def _balances(self) -> Iterable[Metric]:
        tokens = CounterMetricFamily("preread_tokens_not_recomputed", "Prompt tokens taken from stored KV.", labels=OWNER)
        seconds = GaugeMetricFamily("preread_gpu_seconds", "Of prefill, saved and spent.", labels=(*OWNER, "kind"))
        money = GaugeMetricFamily("preread_money", "By the rates in force, saved and spent.", labels=(*OWNER, "kind"))
        rates = self._placement.policy.current().rates
        with self._catalogue.read() as session:
            used, speed = holdings.used(session), holdings.prefill_speed(session)
        for owner, counts in used.items():
            found = balance(counts, rates, speed)
            tokens.add_metric(owner, counts["tokens_reused"])
            seconds.add_metric((*owner, "spent"), found.gpu_seconds_spent)
            money.add_metric((*owner, "spent"), found.money_spent)
            if found.gpu_seconds_saved is not None and found.money_saved is not None:
                seconds.add_metric((*owner, "saved"), found.gpu_seconds_saved)
                money.add_metric((*owner, "saved"), found.money_saved)
        yield from (tokens, seconds, money)


def _gauge(name: str, text: str, value: object) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric((), float(bool(value)))
    return family
