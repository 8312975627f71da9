"""The front door to stored KV: records in, records or the reason for a miss out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping

from storage.tiers.chain import Chain
from storage.tiers.disk import DiskTier
from storage.tiers.flights import Flights, Found, Landed
from storage.tiers.types import DAMAGE, Counts
from storage.types import KVProfile, KVRecord, Miss, ObjectStore

_KEY = re.compile(r"[0-9a-f]{64}")


class Records(dict[str, KVRecord | Miss]):
    """What was asked for, by key; `tiers`: where each record came from."""

    def __init__(self, found: Mapping[str, Found]) -> None:
        super().__init__((key, each.outcome) for key, each in found.items())
        self.tiers = {key: each.tier for key, each in found.items() if each.tier}


class KVStore:
    """Records by key in an object store, with faster tiers in front of it (see `Chain`).

    A record handed out may be shared with other readers: never write to its tensor. `on_damage(key, miss)` is
    called in the caller's thread for an object that is there but wrong; who computes the record again and
    `put`s it repairs the object in place. Safe to share between threads.
    """

    def __init__(
        self,
        objects: ObjectStore,
        memory_bytes: int = 0,
        on_damage: Callable[[str, Miss], None] | None = None,
        *,
        device: str = "cpu",
        device_bytes: int = 0,
        disk: DiskTier | None = None,
    ) -> None:
        self.chain = Chain(objects, memory_bytes=memory_bytes, device=device, device_bytes=device_bytes, disk=disk)
        self.codecs = self.chain.codecs
        self._flights = Flights(self._load, self.chain.is_near)
        self._on_damage = on_damage
        hits = [f"hits_{tier}" for tier in self.chain.counters()]
        self._counts = Counts(["hits", *hits, *(f"miss_{miss}" for miss in Miss), "puts", "deletes"])

    def put(self, record: KVRecord) -> int:
        """Stores the record, over whatever is there; the number of bytes written.

        Raises ValueError where the record contradicts its profile, its key is none or its codec cannot hold it, and
        StorageUnavailable."""
        if not _KEY.fullmatch(record.key):
            raise ValueError("a record's key is 64 lower-case hex digits")
        written = self.chain.put(record)
        self._flights.part([record.key])  # who asks from now on is not told that it is absent
        self._counts.add(puts=1)
        return written

    def get(self, key: str, profile: KVProfile) -> KVRecord | Miss:
        """The record, or why there is none; never an exception. Waits as long as the store does."""
        found = self.chain.look(key, profile) or self._flights.one(key, profile)
        return self._settle(key, found)

    def get_many(
        self, keys: Iterable[str], profile: KVProfile, deadline_s: float, landed: Landed = lambda *_: None
    ) -> Records:
        """Like `get` for every key at once, begun in their order; what has not arrived after `deadline_s` is
        Miss.TIMEOUT. `landed(key, found)` is told of each as it comes, and must not wait."""
        end = time.monotonic() + deadline_s
        looked = {key: self.chain.look(key, profile) for key in dict.fromkeys(keys)}
        for key, near in looked.items():
            if near is not None:
                landed(key, near)
        wanted = [key for key, found in looked.items() if found is None]
        read = self._flights.many(wanted, profile, end, landed) if wanted else {}
        found = {key: each or read.get(key, Found(Miss.TIMEOUT)) for key, each in looked.items()}
        for key, each in found.items():
            self._settle(key, each)
        return Records(found)

    def delete(self, keys: Iterable[str]) -> set[str]:
        """Deletes the objects, if they are there, and forgets them; the keys that the store would not delete.

        Raises StorageUnavailable; some may be deleted by then, so call it again."""
        keys = {key for key in keys if _KEY.fullmatch(key)}
        try:
            left = self.chain.delete(keys)
        finally:
            self._flights.part(keys)
        self._counts.add(deletes=len(keys) - len(left))
        return left

    def keys_in_memory(self) -> list[str]:
        """The records that this process would answer without asking the disk or the store."""
        return [*self.chain.keys("memory"), *self.chain.keys("device")]

    def forget(self, keys: Iterable[str]) -> None:
        """Drops these records from all tiers but the store: for objects that another process has deleted."""
        keys = list(keys)
        self.chain.forget(keys)
        self._flights.part(keys)

    def counters(self) -> dict[str, int]:
        """A snapshot: hits (and hits_<tier>), miss_<reason>, puts, deletes, bytes_read, bytes_written, memory_bytes in
        use. `chain.counters()` has more by tier."""
        tiers = self.chain.counters()
        return self._counts.snapshot() | {
            "bytes_read": sum(each["bytes_read"] for each in tiers.values()),
            "bytes_written": tiers["store"]["bytes_written"],
            "memory_bytes": tiers["memory"]["bytes"],
        }

    def _load(self, key: str, profile: KVProfile) -> Found:
        return self.chain.load(key, profile) if _KEY.fullmatch(key) else Found(Miss.ABSENT)

    def _settle(self, key: str, found: Found) -> KVRecord | Miss:
        """Counts what the caller is going to get, and reports damage."""
        if isinstance(found.outcome, KVRecord):
            self._counts.add(hits=1, **{f"hits_{found.tier}": 1})
            return found.outcome
        self._counts.add(**{f"miss_{found.outcome}": 1})
        if found.outcome in DAMAGE and self._on_damage is not None:
            self._on_damage(key, found.outcome)
        return found.outcome
