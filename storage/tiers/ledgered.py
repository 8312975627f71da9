"""The part of a bounded tier that is the same whatever its medium is."""

from __future__ import annotations

import threading
from collections.abc import Collection

from storage.tiers.ledger import Ledger
from storage.tiers.types import Counts, Held


class Ledgered:
    """What a CacheTier answers from its ledger alone; `name`, `counts` and `_lock`, which is the ledger's, are the tier's."""

    counts: Counts
    _ledger: Ledger
    _lock: threading.Lock

    def touch(self, key: str) -> None:
        """See CacheTier."""
        with self._lock:
            self._ledger.touch(key)

    def held(self) -> dict[str, Held]:
        """See CacheTier."""
        with self._lock:
            return {entry.key: Held(entry.size, entry.codec) for entry in self._ledger.entries()}

    def pin(self, keys: Collection[str]) -> None:
        """See CacheTier."""
        with self._lock:
            self._ledger.pin(keys)

    def unpin(self, keys: Collection[str]) -> None:
        """See CacheTier."""
        with self._lock:
            self._ledger.unpin(keys)

    def refused(self) -> set[str]:
        """See CacheTier."""
        with self._lock:
            return self._ledger.refused()

    def counters(self) -> dict[str, int]:
        """See Tier; with the ledger's figures."""
        with self._lock:
            return self.counts.snapshot() | self._ledger.counters()
