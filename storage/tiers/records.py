"""Records as they are used, in the memory of the host or of a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace

from storage.codecs import Codec
from storage.tiers.ledger import Ledger
from storage.tiers.ledgered import Ledgered
from storage.tiers.types import COUNTS, Copy, Counts, Extent, Fresh, count_load
from storage.types import KVProfile, Miss


class RecordTier(Ledgered):
    """A CacheTier of records whose tensors lie on `device`. A hit costs no more than a look.

    `on_evict(copy, fresh)` is given what had to make room, in the thread that offered something else; `fresh` is
    that offer's.
    """

    def __init__(
        self,
        name: str,
        capacity_bytes: int,
        device: str = "cpu",
        on_evict: Callable[[Copy, Fresh], None] = lambda copy, fresh: None,
    ) -> None:
        self.name = name
        self.counts = Counts(COUNTS)
        self._device = device
        self._on_evict = on_evict
        self._ledger = Ledger(capacity_bytes)
        self._copies: dict[str, Copy] = {}  # without their objects
        self._lock = threading.Lock()

    def load(self, key: str, profile: KVProfile, codec: Codec | None = None) -> Copy | Miss:
        """See Tier."""
        with self._lock:
            copy = self._copies.get(key)
            self._ledger.touch(key)
        found = Miss.ABSENT if copy is None or copy.record.profile != profile else copy
        count_load(self.counts, found)
        return found

    def offer(self, copy: Copy, fresh: Fresh) -> bool:
        """See CacheTier. Copies the tensor if it is not on the device yet."""
        record = copy.record
        if self._ledger.capacity < record.kv.nbytes or self.holds(record.key):
            return False
        if (kv := record.kv.to(self._device)) is not record.kv:
            record = replace(record, kv=kv)
        size = record.kv.untyped_storage().nbytes()  # what is kept alive, a view or not
        evicted: list[Copy] = []
        with self._lock:
            entry = self._ledger.reserve(record.key, size, len(record.token_ids), copy.codec) if fresh() else None
            if entry is not None:
                for victim in entry.victims:
                    evicted.append(self._copies.pop(victim.key))
                    self._ledger.release(victim)
                self._copies[record.key] = Copy(record, codec=copy.codec)
                self._ledger.settle(entry)
        self.counts.add(**{"promotions_declined" if entry is None else "promotions": 1})
        for each in evicted:
            self._on_evict(each, fresh)
        return entry is not None

    def takes(self, key: str, extent: Extent) -> bool:
        """See CacheTier."""
        with self._lock:
            return self._ledger.takes(key, extent.record)

    def forget(self, keys: Collection[str]) -> None:
        """See CacheTier."""
        with self._lock:
            for key in keys:
                if (entry := self._ledger.remove(key)) is not None:
                    del self._copies[key]
                    self._ledger.release(entry)

    def holds(self, key: str) -> bool:
        """See CacheTier."""
        return key in self._copies
