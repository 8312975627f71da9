"""Which entry of a full tier goes first: what is cheap to compute again, for its bytes, and seldom asked for.

GDSF, the Greedy-Dual-Size-Frequency rule: L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-
Size-Frequency Caching Policy", HP Laboratories HPL-98-69R1 (1998). An entry's value is H = L + frequency *
cost / size; the lowest goes, and L, the floor, rises to its value, so that what nobody asks for any more is
overtaken in time.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

_PAST_SHARE = 4  # frequencies remembered of entries that have left, for each that is held
_PAST_LEAST = 1024


class Eviction(Protocol):
    """Orders the entries that may go. Not safe to share between threads: its tier has a lock."""

    def insert(self, key: str, size: int, cost: float) -> None:
        """A new entry: `size` in bytes, `cost` of computing it again in any one unit."""
        ...

    def touch(self, key: str) -> None:
        """The entry was asked for."""
        ...

    def remove(self, key: str) -> None:
        """The entry has left, or may not go for now."""
        ...

    def pop(self) -> str | None:
        """The entry to go next, taken out; None if there is none."""
        ...


@dataclass
class _Entry:
    weight: float  # cost / size
    frequency: int
    stamp: int = 0  # of its latest place in the heap; older places are void


class GDSF:
    """See the module. Every step is O(log n) amortised, and ties go to who was asked for last.

    How often an entry was asked for outlives it for a while: what a scan drove out is not a stranger when it is back,
    while the scan's own entries stay at frequency 1 and drive out each other.
    """

    def __init__(self) -> None:
        self._floor = 0.0
        self._entries: dict[str, _Entry] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._past: OrderedDict[str, int] = OrderedDict()
        self._clock = 0

    def insert(self, key: str, size: int, cost: float) -> None:
        """See Eviction."""
        self._entries[key] = _Entry(cost / max(size, 1), self._past.pop(key, 0) + 1)
        self._place(key)

    def touch(self, key: str) -> None:
        """See Eviction."""
        if (entry := self._entries.get(key)) is not None:
            entry.frequency += 1
            self._place(key)

    def remove(self, key: str) -> None:
        """See Eviction."""
        if (entry := self._entries.pop(key, None)) is not None:
            self._remember(key, entry.frequency)

    def pop(self) -> str | None:
        """See Eviction."""
        while self._heap:
            value, stamp, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is not None and entry.stamp == stamp:
                self._floor = value
                self.remove(key)
                return key
        return None

    def _place(self, key: str) -> None:
        entry = self._entries[key]
        self._clock += 1
        entry.stamp = self._clock
        heapq.heappush(self._heap, (self._floor + entry.frequency * entry.weight, entry.stamp, key))
        if len(self._heap) > 2 * len(self._entries) + 64:  # mostly void places by now
            self._heap = [place for place in self._heap if self._is_valid(place)]
            heapq.heapify(self._heap)

    def _is_valid(self, place: tuple[float, int, str]) -> bool:
        entry = self._entries.get(place[2])
        return entry is not None and entry.stamp == place[1]

    def _remember(self, key: str, frequency: int) -> None:
        self._past[key] = frequency
        if len(self._past) > max(_PAST_LEAST, _PAST_SHARE * len(self._entries)):
            self._past.popitem(last=False)
