"""Between sites: what was fetched from the parent, the lease, and how far each child is with its deletions."""

from __future__ import annotations

from collections.abc import Iterable
from time import time

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.api.parts import ApiParts
from serving.doors.sites import lags
from serving.parent_site import ParentSite

FAILURES = ("missing", "timeout", "unavailable", "damaged", "unkept")


class SiteMetrics(Collector):
    """Asked of the catalogue and the stores at every scrape."""

    def __init__(self, parts: ApiParts) -> None:
        self._parts = parts

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        pending = GaugeMetricFamily("preread_site_tombstones_pending", "Deletions a site has not erased.", labels=("site",))
        silent = GaugeMetricFamily("preread_site_silent_seconds", "Since a site was last heard of.", labels=("site",))
        for name, seconds, count in lags(self._parts):
            pending.add_metric((name,), count)
            silent.add_metric((name,), float("inf") if seconds is None else seconds)
        yield from (pending, silent)
        if self._parts.parent is not None:
            yield from _of_parent(self._parts.parent)


def _of_parent(parent: ParentSite) -> Iterable[Metric]:
    counts, link = parent.objects.counters(), parent.link()
    by = ("by",)  # a reader that asked, or replication ahead of any
    objects = CounterMetricFamily("preread_parent_objects", "Objects fetched from the parent site.", labels=by)
    size = CounterMetricFamily("preread_parent_bytes", "Bytes fetched from the parent site.", labels=by)
    objects.add_metric(("reader",), counts["objects"])
    size.add_metric(("reader",), counts["bytes"])
    objects.add_metric(("replication",), link.pulled_objects if link else 0)
    size.add_metric(("replication",), link.pulled_bytes if link else 0)
    failures = CounterMetricFamily("preread_parent_failures", "Fetches that failed, by how.", labels=("reason",))
    for reason in FAILURES:
        failures.add_metric((reason,), counts[reason])
    yield from (objects, size, failures)
    kept = parent.kept.counters()
    yield GaugeMetricFamily("preread_parent_kept_bytes", "Bytes of the parent's objects that are kept here.", kept["bytes"])
    if "capacity_bytes" in kept:
        budget = kept["capacity_bytes"]
        yield GaugeMetricFamily("preread_parent_kept_capacity_bytes", "Bytes of them that may be kept.", budget)
    synced = link.synced_at if link else None
    yield GaugeMetricFamily("preread_lease_held", "1: stored KV may be used.", float(parent.lease.held()))
    age = float("inf") if synced is None else max(0.0, time() - synced)
    yield GaugeMetricFamily("preread_lease_age_seconds", "Since the last exchange that left the site in step.", age)
    lag = link.newest - (link.cursor or 0) if link else 0
    yield GaugeMetricFamily("preread_tombstone_lag", "Deletions at the parent that are not applied here.", lag)
