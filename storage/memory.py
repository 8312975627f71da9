"""The memory tier: verified records, least recently used out first, never more than a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from storage.types import KVRecord


class MemoryTier:
    """A bounded LRU of records. Safe to share between threads.

    Every `forget` starts a new generation. A reader notes it before it goes to the store and hands it
    to `add`, so that what was read before a deletion never comes back after it.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[str, tuple[KVRecord, int]] = OrderedDict()
        self._used = 0
        self._generation = 0
        self._pinned: set[str] = set()
        self._lock = threading.Lock()

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def used_bytes(self) -> int:
        return self._used

    def keys(self) -> list[str]:
        """What is held, least recently used first."""
        with self._lock:
            return list(self._entries)

    def get(self, key: str) -> KVRecord | None:
        """The record, now the most recently used."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def add(self, record: KVRecord, size: int, generation: int) -> None:
        """Keeps a record that holds `size` bytes, unless something was forgotten since `generation`."""
        with self._lock:
            if generation != self._generation or size > self._capacity:
                return
            self._drop(record.key)
            self._entries[record.key] = (record, size)
            self._used += size
            while self._used > self._capacity:
                self._drop(next((key for key in self._entries if key not in self._pinned), record.key))

    def pin(self, keys: Iterable[str]) -> None:
        """Evict the records of these keys for no others, here already or not. Where all is pinned, nothing new is kept."""
        with self._lock:
            self._pinned.update(keys)

    def unpin(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._pinned.difference_update(keys)

    def forget(self, keys: Iterable[str]) -> None:
        """Drops the records of these keys, and keeps out those being read right now."""
        with self._lock:
            self._generation += 1
            for key in keys:
                self._drop(key)

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used -= entry[1]
