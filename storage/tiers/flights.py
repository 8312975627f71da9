"""One read per key under way, however many wait for it: the others join."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from storage.deadline import until
from storage.types import KVProfile, KVRecord, Miss

log = logging.getLogger(__name__)
Landed = Callable[[str, "Found"], None]
READERS_PER_CALL = 4
MAX_READERS = 32  # a store that stalls holds threads until its time-out; this bounds how many


class Found(NamedTuple):
    """What a read has come to. `tier`: which one had it; empty for a miss."""

    outcome: KVRecord | Miss
    tier: str = ""


class _Flight:
    """A read under way; `found` is None until it ends. After `end` of the monotonic clock its store is not waited for."""

    def __init__(self, counted: bool, end: float = math.inf) -> None:
        self.counted = counted  # among those of which there are MAX_READERS at most
        self.end = end
        self.found: Found | None = None


class Flights:
    """Runs `read(key, profile)` once for all who ask at the same time. `is_near(key)`: it will not wait for a slow store."""

    def __init__(self, read: Callable[[str, KVProfile], Found], is_near: Callable[[str], bool]) -> None:
        self._read, self._is_near = read, is_near
        self._open: dict[tuple[str, KVProfile], _Flight] = {}
        self._readers = 0
        self._changed = threading.Condition()

    def one(self, key: str, profile: KVProfile) -> Found:
        """The outcome for one key, however long it takes; read in the caller's own thread if nobody reads it yet."""
        with self._changed:
            joined = self._open.get((key, profile))
            if joined is None:
                flight = self._open[key, profile] = _Flight(counted=False)
            else:
                while joined.found is None:
                    self._changed.wait()
                if joined.found.outcome is not Miss.TIMEOUT:
                    return joined.found
                flight = _Flight(counted=False)  # that was the first caller's time-out, not this one's
        return self._fly(flight, key, profile)

    def many(
        self, keys: Sequence[str], profile: KVProfile, end: float, landed: Landed = lambda *_: None
    ) -> dict[str, Found]:
        """What has come by `end` of the monotonic clock; `landed` is told of each at once, and must not wait. After that
        nothing more is begun for this caller, and reads that it began end; those of others go on."""
        todo, joined, found = deque(keys), dict[str, _Flight](), dict[str, Found]()
        own: set[str] = set()
        with self._changed:
            while True:
                for key, flight, outcome in [(key, each, each.found) for key, each in joined.items() if each.found]:
                    del joined[key]
                    own.discard(key)
                    if outcome.outcome is Miss.TIMEOUT and flight.end < end:
                        todo.append(key)  # its first caller's time was up, not this one's
                        continue
                    found[key] = outcome
                    landed(key, outcome)
                for _ in range(len(todo)):
                    key = todo.popleft()
                    begun = self._open.get((key, profile))
                    near = self._is_near(key)  # what lies on disk does not wait behind a slow store
                    if begun is None and (near or len(own) < READERS_PER_CALL):
                        begun = self._begin(key, profile, end)
                        own.update(() if near else (key,))
                    if begun is None:
                        own.discard(key)
                        todo.append(key)
                    else:
                        joined[key] = begun
                left = end - time.monotonic()
                if not (todo or joined) or left <= 0:
                    return found
                self._changed.wait(left)

    def part(self, keys: Collection[str]) -> None:
        """What these keys stand for has changed: nobody joins a read that was begun before."""
        with self._changed:
            for each in [each for each in self._open if each[0] in keys]:
                del self._open[each]

    def _begin(self, key: str, profile: KVProfile, end: float) -> _Flight | None:
        """Read it in a thread of its own, unless too many wait for a slow store already. Called with the lock."""
        counted = not self._is_near(key)
        if counted and self._readers >= MAX_READERS:
            return None
        flight = _Flight(counted, end)
        # A daemon, not a pool's: a pool is joined at exit, where a stalled store would hold the process.
        thread = threading.Thread(target=self._fly_bounded, args=(flight, key, profile), name="kv-reader", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads are to be had
            return None
        self._open[key, profile] = flight
        self._readers += counted
        return flight

    def _fly_bounded(self, flight: _Flight, key: str, profile: KVProfile) -> None:
        with until(flight.end):  # so that a thread which is left behind ends as well
            self._fly(flight, key, profile)

    def _fly(self, flight: _Flight, key: str, profile: KVProfile) -> Found:
        found = Found(Miss.UNAVAILABLE)  # where the read raises
        try:
            found = self._read(key, profile)
        except Exception:
            log.exception("reading KV failed")
        finally:
            with self._changed:
                flight.found = found
                self._readers -= flight.counted
                if self._open.get((key, profile)) is flight:
                    del self._open[key, profile]
                self._changed.notify_all()
        return found
