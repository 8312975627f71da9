"""What policies ask of a process's tiers, whichever tiers it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from storage.kvstore import KVStore
from storage.types import KVProfile, KVRecord

ByProfile = Callable[[Collection[str]], Mapping[KVProfile, Sequence[str]]]
BATCH = 32  # records that are on their way into memory at once
FETCH_SECONDS = 30.0  # for a batch; what has not come by then comes with the next try


class TierControl(Protocol):
    """`tier` is a name from `policy.types.TIERS`. Keys that are not stored, and tiers that the process has not, are passed
    over."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """Those it has beside the object store, fastest first."""
        ...

    def keys(self, tier: str) -> Collection[str]:
        """The keys that lie in a tier."""
        ...

    def pin(self, tier: str, keys: Collection[str]) -> None:
        """Bring these there, and evict them for nothing else until they are unpinned or deleted."""
        ...

    def unpin(self, tier: str, keys: Collection[str]) -> None: ...

    def prefetch(self, tier: str, keys: Collection[str]) -> int:
        """Bring these there, as far as there is room; how many are there or on their way. May take long."""
        ...


class NoTiers:
    """A process that keeps no KV."""

    tiers: tuple[str, ...] = ()

    def keys(self, tier: str) -> Collection[str]:
        return ()

    def pin(self, tier: str, keys: Collection[str]) -> None:
        return

    def unpin(self, tier: str, keys: Collection[str]) -> None:
        return

    def prefetch(self, tier: str, keys: Collection[str]) -> int:
        return 0


class MemoryControl:
    """Over a `KVStore` and the memory that it has. `by_profile`: keys by what their records are read as; keys that it leaves
    out are not read."""

    tiers = ("memory",)

    def __init__(self, store: KVStore, by_profile: ByProfile) -> None:
        self._store, self._by_profile = store, by_profile

    def keys(self, tier: str) -> Collection[str]:
        return self._store.keys_in_memory() if tier in self.tiers else ()

    def pin(self, tier: str, keys: Collection[str]) -> None:
        if tier in self.tiers:
            self._store.pin(keys)
            self.prefetch(tier, keys)

    def unpin(self, tier: str, keys: Collection[str]) -> None:
        if tier in self.tiers:
            self._store.unpin(keys)

    def prefetch(self, tier: str, keys: Collection[str]) -> int:
        if tier not in self.tiers:
            return 0
        missing = sorted(set(keys).difference(self.keys(tier)))
        for profile, some in self._by_profile(missing).items():
            for at in range(0, len(some), BATCH):
                found = self._store.get_many(some[at : at + BATCH], profile, FETCH_SECONDS)
                here = set(self.keys(tier))
                if any(isinstance(record, KVRecord) and key not in here for key, record in found.items()):
                    return len(here.intersection(keys))  # full: going on would only drop what has just come
        return len(set(keys).intersection(self.keys(tier)))
