"""What policies ask of a process's tiers, whichever tiers it has."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from storage.tiers.chain import Chain
from storage.types import KVProfile

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


class ChainControl:
    """Over a `Chain`. `profile`: what its records are read as; None: they are not read."""

    def __init__(self, chain: Chain, profile: Callable[[], KVProfile | None]) -> None:
        self._chain, self._profile = chain, profile
        self.tiers = chain.caches

    def keys(self, tier: str) -> Collection[str]:
        return self._chain.keys(tier)

    def pin(self, tier: str, keys: Collection[str]) -> None:
        profile = self._profile()
        if tier in self.tiers and profile is not None:
            self._chain.pin(tier, keys)
            self._chain.prefetch(tier, keys, profile)

    def unpin(self, tier: str, keys: Collection[str]) -> None:
        if tier in self.tiers:
            self._chain.unpin(tier, keys)

    def prefetch(self, tier: str, keys: Collection[str]) -> int:
        profile = self._profile() if tier in self.tiers else None
        if profile is None:
            return 0
        wanted = list(dict.fromkeys(keys))
        here = set(self.keys(tier))
        missing = [key for key in wanted if key not in here]
        for at in range(0, len(missing), BATCH):
            batch = missing[at : at + BATCH]
            self._chain.prefetch(tier, batch, profile)
            self._chain.flush(FETCH_SECONDS)
            here = set(self.keys(tier))
            if not here.issuperset(batch):
                break  # full, or out of reach: going on would only drop what has just come
        return len(here.intersection(wanted))
