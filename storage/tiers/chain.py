"""The tiers as one: reads go down until one has the record, copies go up in the background, deletions reach all."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial

from storage.codecs.shelf import CodecShelf
from storage.format import encode
from storage.tiers.disk import DiskTier
from storage.tiers.flights import Found
from storage.tiers.mover import Mover
from storage.tiers.records import RecordTier
from storage.tiers.store import StoreTier
from storage.tiers.types import CacheTier, Copy, Extent, Fresh, Held, Tier
from storage.types import KVProfile, KVRecord, Miss, ObjectStore

MAX_MOVES = 256
MAX_MOVING_BYTES = 512 << 20  # kept in memory by copies that wait to be moved
MAX_PREFETCHES = 100_000


class Chain:
    """Device and host memory, local disk, and the store that is the records' home.

    What is read is kept by every faster tier: by host memory at once, by the others in the background, where a copy
    that finds the queue full is not moved, and counted. So nothing is only in a fast tier, and demotion is no
    more than leaving; a record that has to leave the device goes to host memory. Use in a faster tier counts as use
    in the slower ones: what is hot in memory does not grow cold on disk.
    """

    def __init__(
        self,
        objects: ObjectStore,
        *,
        memory_bytes: int = 0,
        device: str = "cpu",
        device_bytes: int = 0,
        disk: DiskTier | None = None,
    ) -> None:
        self.codecs = CodecShelf(objects)
        self._memory = RecordTier("memory", memory_bytes)
        self._device = RecordTier("device", device_bytes, device, self._demote) if device_bytes else None
        self._disk = disk
        self._home = StoreTier("store", objects)
        disks = [disk] if disk is not None else []
        self._records = [tier for tier in (self._device, self._memory) if tier is not None]
        self._sources: list[Tier] = [*disks, self._home]
        caches: list[CacheTier] = [*self._records, *disks]
        self._caches = {tier.name: tier for tier in caches}
        self._mover = Mover("kv-mover", MAX_MOVES, MAX_MOVING_BYTES)
        self._prefetcher = Mover("kv-prefetch", MAX_PREFETCHES)
        self._epoch = 0
        self._deleting: Counter[str] = Counter()
        self._lock = threading.Lock()

    # --- reading ----------------------------------------------------------------------------------------

    def look(self, key: str, profile: KVProfile) -> Found | None:
        """The record, if it is in memory."""
        for tier in self._records:
            copy = tier.load(key, profile)
            if isinstance(copy, Copy):
                self._used(copy, tier)
                return Found(copy.record, tier.name)
        return None

    def load(self, key: str, profile: KVProfile) -> Found:
        """The record from the first tier that has it whole, or why the home has not. Never raises on what is stored."""
        codec = self.codecs.find(profile.codec)
        if isinstance(codec, Miss):
            return Found(codec)
        fresh, outcome = self._fresh(key), Miss.ABSENT
        if self._memory.holds(key) and (found := self.look(key, profile)):
            return found  # another read has brought it meanwhile
        for tier in self._sources:
            copy = tier.load(key, profile, codec)
            if isinstance(copy, Copy):
                self._spread(copy, tier, fresh)
                return Found(copy.record, tier.name)
            outcome = copy  # the home's in the end: what a cache has lost is not lost
        return Found(outcome)

    def is_near(self, key: str) -> bool:
        """Whether the disk has it: a read will not wait for the store."""
        return self._disk is not None and self._disk.holds(key)

    def nearest(self, key: str) -> str:
        """The fastest tier that seems to have it, by name; the home for what no cache has."""
        return next((name for name, tier in self._caches.items() if tier.holds(key)), self._home.name)

    def _used(self, copy: Copy, by: RecordTier) -> None:
        if self._device is not None and by is not self._device:
            self._move(copy, self._device, self._fresh(copy.record.key))
        for tier in self._caches.values():
            if tier is not by:
                tier.touch(copy.record.key)

    # --- writing and deleting ---------------------------------------------------------------------------

    def put(self, record: KVRecord) -> int:
        """Store the record at home, and then, in the background, on the disk; the bytes written. What was written
        says nothing about being read soon, so memory does not take it. Raises ValueError, StorageUnavailable."""
        fresh = self._fresh(record.key)
        parts = encode(record, self.codecs.required(record.profile.codec))
        written = self._home.put(record.key, parts)
        if self._disk is not None:
            self._move(Copy(record, parts), self._disk, fresh)
        return written

    def delete(self, keys: Collection[str]) -> set[str]:
        """Delete at home, and forget; those that are still there. Raises StorageUnavailable, having forgotten all the same."""
        with self._gone(keys):
            return self._home.delete(keys)

    def forget(self, keys: Collection[str]) -> None:
        """Drop these from every cache, and keep out those that are being read or moved right now."""
        with self._gone(keys):
            pass

    @contextlib.contextmanager
    def _gone(self, keys: Collection[str]) -> Iterator[None]:
        """Copies of these keys are refused by all tiers inside; and afterwards those that were read before its end."""
        with self._lock:
            self._epoch += 1
            self._deleting.update(keys)
        try:
            yield
        finally:
            for tier in self._caches.values():
                tier.forget(keys)
            with self._lock:
                self._epoch += 1
                self._deleting -= Counter(keys)  # drops those at zero

    def _fresh(self, key: str) -> Fresh:
        """Whether what is read of a key from now on may still be kept."""
        epoch = self._epoch
        return lambda: epoch == self._epoch and key not in self._deleting

    # --- moving -----------------------------------------------------------------------------------------

    def _spread(self, copy: Copy, source: Tier, fresh: Fresh) -> None:
        self._memory.offer(copy, fresh)
        if self._device is not None:
            self._move(Copy(copy.record, codec=copy.codec), self._device, fresh)
        if self._disk is not None and source is not self._disk:
            self._move(copy, self._disk, fresh)

    def _move(self, copy: Copy, to: CacheTier, fresh: Fresh) -> None:
        if not self._mover.submit(lambda: to.offer(copy, fresh), copy.nbytes):
            to.counts.add(promotions_dropped=1)

    def _demote(self, copy: Copy, fresh: Fresh) -> None:
        """What left the device goes to host memory. Called in the mover's thread."""
        self._memory.offer(copy, fresh)

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing is on its way between tiers; False if that took too long."""
        return self._mover.flush(timeout_s) and self._prefetcher.flush(timeout_s)

    # --- policies ---------------------------------------------------------------------------------------

    def pin(self, tier: str, keys: Collection[str]) -> None:
        """Never evict these from the tier, be they there or still to come (see `prefetch`), in this process's life.

        Pins count against the tier's budget: one that comes when pins have taken it all is refused, and counted
        as `pins_refused`. A deletion drops pinned records too. Raises ValueError for a tier there is not."""
        self._cache(tier).pin(keys)

    def unpin(self, tier: str, keys: Collection[str]) -> None:
        """These may be evicted again. Raises ValueError for a tier there is not."""
        self._cache(tier).unpin(keys)

    def keep_as(self, codecs: Mapping[str, str]) -> None:
        """Keep copies of these keys on disk in these codecs of the table from now on, and all others in the object's own.

        What is read from such a copy, in memory too, are the codec's numbers: the operator's word. When the word
        changes, copies of the earlier codec are forgotten by every tier and come again from home."""
        if self._disk is not None and (stale := self._disk.keep_as(codecs)):
            self.forget(stale)

    def prefetch(self, tier: str, extents: Mapping[str, Extent], profile: KVProfile) -> int:
        """Bring these keys into the tier in the background, verified; how many were queued. A pinned one that has no room
        there is not read. Raises ValueError for a tier there is not."""
        target = self._cache(tier)
        return sum(self._prefetcher.submit(partial(self._bring, key, each, profile, target)) for key, each in extents.items())

    def _bring(self, key: str, extent: Extent, profile: KVProfile, target: CacheTier) -> None:
        if target.holds(key) or not target.takes(key, extent):
            return
        fresh, codec = self._fresh(key), self.codecs.find(profile.codec)
        if isinstance(codec, Miss):
            return
        for source in self._sources:
            if source is not target and isinstance(copy := source.load(key, profile, codec), Copy):
                target.offer(copy, fresh)
                return

    def _cache(self, tier: str) -> CacheTier:
        if tier not in self._caches:
            raise ValueError(f"no tier {tier!r} with a budget here; there is {', '.join(self._caches)}")
        return self._caches[tier]

    # --- what lies where --------------------------------------------------------------------------------

    @property
    def caches(self) -> tuple[str, ...]:
        """The tiers with a budget, fastest first."""
        return tuple(self._caches)

    def held(self, tier: str) -> dict[str, Held]:
        """What a tier holds, by key; nothing, if there is no such tier."""
        return self._caches[tier].held() if tier in self._caches else {}

    def refused(self, tier: str) -> set[str]:
        """The pinned keys that a tier has no room for; none, if there is no such tier."""
        return self._caches[tier].refused() if tier in self._caches else set()

    def keys(self, tier: str) -> list[str]:
        """The keys of what a tier holds."""
        return list(self.held(tier))

    def counters(self) -> dict[str, dict[str, int]]:
        """By tier, fastest first."""
        return {tier.name: tier.counters() for tier in [*self._records, *self._sources]}

    def reclaim(self) -> None:
        """Call it now and then: what processes that have not come back left on the disk is removed."""
        if self._disk is not None:
            self._disk.reclaim()
