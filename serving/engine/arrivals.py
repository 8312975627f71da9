"""What one request has fetched so far: filled by threads that read, emptied by the one that computes."""

from __future__ import annotations

import threading
from collections.abc import Collection

from storage.tiers.flights import Found
from storage.types import KVRecord, Miss


class Arrivals:
    """Outcomes by KV key, each to be had once. `tiers`: where each record came from; `stored`: the keys of records."""

    def __init__(self, keys: Collection[str]) -> None:
        self.tiers: dict[str, str] = {}
        self.stored: set[str] = set()
        self._awaited = set(keys)
        self._new: dict[str, KVRecord | Miss] = {}
        self._lock = threading.Lock()

    def land(self, key: str, found: Found) -> None:
        self._settle(key, found.outcome, found.tier)

    def end(self, keys: Collection[str]) -> None:
        """What has not come of these will not come."""
        for key in keys:
            self._settle(key, Miss.UNAVAILABLE, "")

    def take(self) -> dict[str, KVRecord | Miss]:
        """What has come since this was last asked."""
        with self._lock:
            new, self._new = self._new, {}
            return new

    def awaits(self, key: str | None) -> bool:
        """Whether it may still come. Ask after `take`: what came in between is taken next time."""
        with self._lock:
            return key in self._awaited or key in self._new

    def _settle(self, key: str, outcome: KVRecord | Miss, tier: str) -> None:
        with self._lock:
            if key in self._awaited:
                self._awaited.discard(key)
                self._new[key] = outcome
                if isinstance(outcome, KVRecord):
                    self.stored.add(key)
                if tier:
                    self.tiers[key] = tier
