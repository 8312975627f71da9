"""The part of a bounded tier that is the same whatever its medium is."""

from __future__ import annotations

import threading
from collections.abc import Collection

from storage.tiers.ledger import Ledger
from storage.tiers.types import Counts


class Ledgered:
    """What a CacheTier answers from its ledger alone; `name`, `counts` and `_lock`, which is the ledger's, are the tier's."""

    counts: Counts
    _ledger: Ledger
    _lock: threading.Lock

    def touch(self, key: str) -> None:
        """See CacheTier."""
        with self._lock:
            self._ledger.touch(key)

    def keys(self) -> list[str]:
        """See CacheTier."""
        with self._lock:
            return self._ledger.keys()

    def pin(self, keys: Collection[str]) -> None:
        """See CacheTier."""
        with self._lock:
            self._ledger.pin(keys)

    def unpin(self, keys: Collection[str]) -> None:
        """See CacheTier."""
        with self._lock:
            self._ledger.unpin(keys)

    def counters(self) -> dict[str, int]:
        """See Tier; with the ledger's figures."""
        with self._lock:
            return self.counts.snapshot() | self._ledger.counters()
