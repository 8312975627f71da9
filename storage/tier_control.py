"""What policies ask of a process's tiers, whichever tiers it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from storage.tiers.chain import Chain
from storage.tiers.types import Extent, Held
from storage.types import KVProfile

ByProfile = Callable[[Collection[str]], Mapping[KVProfile, Mapping[str, Extent]]]
BATCH = 32  # records that are on their way into memory at once
FETCH_SECONDS = 30.0  # for a batch; what has not come by then comes with the next try


class TierControl(Protocol):
    """`tier` is a name from `policy.types.TIERS`. Keys that are not stored, and tiers that the process has not, are passed
    over."""

    @property
    def tiers(self) -> tuple[str, ...]:
        """Those it has beside the object store, fastest first."""
        ...

    def held(self, tier: str) -> Mapping[str, Held]:
        """What lies in a tier, by key."""
        ...

    def refused(self, tier: str) -> Collection[str]:
        """The keys that are pinned in a tier and have no room there."""
        ...

    def keep_as(self, codecs: Mapping[str, str]) -> None:
        """Keep copies on disk of these keys in these codecs, and of all others in the object's own."""
        ...

    def pin(self, tier: str, keys: Collection[str]) -> None:
        """Bring these there, and evict them for nothing else until they are unpinned or deleted. What has no room is not
        read for it, however often this is called."""
        ...

    def unpin(self, tier: str, keys: Collection[str]) -> None: ...

    def prefetch(self, tier: str, keys: Collection[str]) -> int:
        """Bring these there, as far as there is room; how many are there or on their way. May take long."""
        ...


class ChainControl:
    """Over a `Chain`. `by_profile`: keys and their sizes, by what their records are read as; keys that it leaves out are
    not read."""

    def __init__(self, chain: Chain, by_profile: ByProfile) -> None:
        self._chain, self._by_profile = chain, by_profile
        self.tiers = tuple(name for name in chain.caches if chain.counters()[name]["capacity_bytes"])

    def held(self, tier: str) -> Mapping[str, Held]:
        return self._chain.held(tier)

    def refused(self, tier: str) -> Collection[str]:
        return self._chain.refused(tier)

    def keep_as(self, codecs: Mapping[str, str]) -> None:
        self._chain.keep_as(codecs)

    def pin(self, tier: str, keys: Collection[str]) -> None:
        if tier in self.tiers:
            self._chain.pin(tier, keys)
            for profile, some in self._by_profile(keys).items():
                self._chain.prefetch(tier, some, profile)

    def unpin(self, tier: str, keys: Collection[str]) -> None:
        if tier in self.tiers:
            self._chain.unpin(tier, keys)

    def prefetch(self, tier: str, keys: Collection[str]) -> int:
        if tier not in self.tiers:
            return 0
        missing = sorted(set(keys).difference(self.held(tier)))
        for profile, some in self._by_profile(missing).items():
            ordered = list(some.items())
            for at in range(0, len(ordered), BATCH):
                batch = dict(ordered[at : at + BATCH])
                self._chain.prefetch(tier, batch, profile)
                self._chain.flush(FETCH_SECONDS)
                if not self.held(tier).keys() >= batch.keys():  # full, or out of reach: more would drop what has just come
                    return len(set(keys).intersection(self.held(tier)))
        return len(set(keys).intersection(self.held(tier)))
