"""What stored KV's tiers and the object store count of themselves, for Prometheus: read when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TIER_COUNTERS = {
    "hits": "Reads that the tier answered.",
    "misses": "Reads that it did not answer.",
    "damaged": "Copies found damaged.",
    "bytes_read": "Bytes read from its medium.",
    "bytes_written": "Bytes written to its medium.",
    "promotions": "Copies taken in from slower tiers.",
    "promotions_declined": "Copies not taken in: no room, or writing rests after an error.",
    "promotions_dropped": "Copies not taken in: too many were waiting.",
    "evictions": "Copies that made room for others.",
    "write_errors": "Copies that could not be written or removed.",
    "pins_refused": "Pinned copies that found no room.",
}
_TIER_GAUGES = {
    "bytes": "Bytes in use.",
    "capacity_bytes": "Bytes that may be in use.",
    "pinned_bytes": "Bytes in use that are pinned.",
    "entries": "Copies held.",
    "pins_without_room": "Pinned copies that are not here for want of room.",
}


class TierMetrics(Collector):
    """What each tier of stored KV counts (see `storage.tiers`), read when asked."""

    def __init__(self, count_tiers: Callable[[], Mapping[str, Mapping[str, int]]]) -> None:
        self._count_tiers = count_tiers

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        tiers = self._count_tiers()
        for kind, table in ((CounterMetricFamily, _TIER_COUNTERS), (GaugeMetricFamily, _TIER_GAUGES)):
            for name, text in table.items():
                family = kind(f"preread_kv_tier_{name}", text, labels=("tier",))
                for tier, counts in tiers.items():
                    if name in counts:
                        family.add_metric((tier,), counts[name])
                yield family


class StoreMetrics(Collector):
    """What the object store counts of itself."""

    def __init__(self, count_store: Callable[[], Mapping[str, int]]) -> None:
        self._count_store = count_store

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        counts = dict(self._count_store())
        is_open = counts.pop("breaker_open", 0)
        yield GaugeMetricFamily("preread_object_store_breaker_open", "1: the store is being left alone.", is_open)
        family = CounterMetricFamily("preread_object_store", "The object store's requests and troubles.", labels=("event",))
        for event, count in counts.items():
            family.add_metric((event,), count)
        yield family
