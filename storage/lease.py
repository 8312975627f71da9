"""A child site's leave to use stored KV: it lasts for a while after each exchange with the parent, and no longer.

What was deleted at the parent reaches the site with the next exchange. A site that is cut off cannot know, so it computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from storage.kvstore import KVStore, Records
from storage.tiers.flights import Found, Landed
from storage.types import KVProfile, KVRecord, Miss


class Lease:
    """Whether this process may use stored KV. It reads no clock that can be set.

    Another process talks to the parent, and counts in the catalogue the exchanges that left the site in step, none of which
    takes longer than `exchange_s`. If the count has changed since the last look, one has ended after that look, and so
    has begun at most `exchange_s` before it: all that the parent had deleted by then is erased.
    """

    def __init__(self, seconds: float, exchange_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._exchange_s, self._clock = exchange_s, clock
        self._count: int | None = None
        self._looked, self._until = clock(), float("-inf")
        self._lock = threading.Lock()

    def look(self, count: Callable[[], int], forget: Callable[[], object]) -> None:
        """Read the count, drop from memory what was deleted, and only then renew."""
        now = self._clock()
        found = count()
        forget()
        with self._lock:
            if self._count is not None and found != self._count:
                self._until = self._looked - self._exchange_s + self.seconds
            self._count, self._looked = found, now

    def held(self) -> bool:
        return self._clock() < self._until

    def left(self) -> float:
        """Seconds until it ends; negative when it has."""
        return self._until - self._clock()


class LeasedKVStore(KVStore):
    """A KVStore whose records are used only under a lease; without it each is Miss.UNSYNCED. Writing needs none."""

    def __init__(self, *arguments: Any, lease: Lease, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._lease = lease

    def get(self, key: str, profile: KVProfile) -> KVRecord | Miss:
        """See KVStore."""
        return super().get(key, profile) if self._lease.held() else Miss.UNSYNCED

    def get_many(
        self, keys: Iterable[str], profile: KVProfile, deadline_s: float, landed: Landed = lambda *_: None
    ) -> Records:
        """See KVStore."""
        if not self._lease.held():
            return Records({key: Found(Miss.UNSYNCED) for key in keys})
        return super().get_many(keys, profile, deadline_s, landed)
