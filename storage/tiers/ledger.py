"""What a bounded tier holds: bytes are reserved before they are written, and who goes to make room is decided here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from storage.tiers.eviction import GDSF, Eviction


@dataclass(eq=False)
class Entry:
    """A place for a key: `size` in bytes, `cost` of computing it again. `victims` have to leave the medium before
    anything is written here. `codec`: see `Copy`."""

    key: str
    size: int
    cost: int
    codec: str = ""
    victims: list[Entry] = field(default_factory=list)
    settled: bool = False


class Ledger:
    """Sizes by key under one budget. Pure bookkeeping: its tier has a lock, and moves the bytes.

    The bytes of what was evicted or removed count until the tier says by `release` that they are gone. So what
    lies in the medium is never more than `capacity`, whoever writes and removes at the same time.
    """

    def __init__(self, capacity: int, eviction: Eviction | None = None) -> None:
        self.capacity = capacity
        self.used_bytes = 0  # written or reserved
        self.pinned_bytes = 0
        self.evictions = 0
        self.pins_refused = 0  # ever; `refused` says which are now
        self._leaving_bytes = 0
        self._evictable_bytes = 0
        self._entries: dict[str, Entry] = {}
        self._pins: set[str] = set()  # also of keys that are not here yet
        self._refused: dict[str, int] = {}  # pins that found no room, and what room there was
        self._eviction = eviction or GDSF()

    def get(self, key: str) -> Entry | None:
        """The entry, if its bytes are here, and not merely on their way."""
        entry = self._entries.get(key)
        return entry if entry is not None and entry.settled else None

    def entries(self) -> list[Entry]:
        """What is here."""
        return [entry for entry in self._entries.values() if entry.settled]

    def counters(self) -> dict[str, int]:
        """Figures of now: `bytes` in use or reserved, `capacity_bytes`, `pinned_bytes`, `entries`, `pins_without_room`; and
        of ever: `evictions`, `pins_refused`."""
        return {
            "bytes": self.used_bytes,
            "capacity_bytes": self.capacity,
            "pinned_bytes": self.pinned_bytes,
            "entries": len(self._entries),
            "pins_without_room": len(self._refused),
            "evictions": self.evictions,
            "pins_refused": self.pins_refused,
        }

    def touch(self, key: str) -> None:
        """The key was asked for, here or in a faster tier."""
        self._eviction.touch(key)

    def reserve(self, key: str, size: int, cost: int, codec: str = "") -> Entry | None:
        """Room for a new key; None if it is here or on its way, or if pins, reservations and what is still leaving
        take too much. Remove and `release` its victims, write, then `settle` it; or `cancel` it."""
        if key in self._entries:
            return None
        room = self.capacity - self.used_bytes - self._leaving_bytes
        if size > self._room():
            self._refuse(key)
            return None
        entry = self._entries[key] = Entry(key, size, cost, codec)
        while size > room and (victim := self._eviction.pop()) is not None:
            entry.victims.append(self._leave(victim))
            room += entry.victims[-1].size
            self._evictable_bytes -= entry.victims[-1].size
        self.evictions += len(entry.victims)
        self.used_bytes += size
        return entry

    def takes(self, key: str, size: int) -> bool:
        """Whether it is worth bringing this key here, of at most about so many bytes. A pin is refused at once that has no
        room beside the other pins, or found none when there was no less than now: it is not fetched again at every look."""
        if key not in self._pins or self._room() > max(size - 1, self._refused.get(key, -1)):
            return True
        self._refuse(key)
        return False

    def refused(self) -> set[str]:
        """The pinned keys that are not here for want of room."""
        return set(self._refused)

    def settle(self, entry: Entry) -> bool:
        """The entry's bytes are written. False if its key was removed meanwhile: take them away, then `release`."""
        if self._entries.get(entry.key) is not entry:
            return False
        entry.settled = True
        self._refused.pop(entry.key, None)
        if entry.key in self._pins:
            self.pinned_bytes += entry.size
        else:
            self._let_go(entry)
        return True

    def cancel(self, entry: Entry) -> None:
        """Nothing was written for this reservation, or it is gone again."""
        if self._entries.get(entry.key) is entry:
            self._leave(entry.key)
        self.release(entry)

    def remove(self, key: str) -> Entry | None:
        """What to take away, and then to `release`; None where there is nothing, or its writer will do so."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.settled and key in self._pins:
            self.pinned_bytes -= entry.size
        elif entry.settled:
            self._hold_back(entry)
        self._leave(key)
        return entry if entry.settled else None

    def release(self, entry: Entry) -> None:
        """The bytes of a removed entry or a victim have left the medium."""
        self._leaving_bytes -= entry.size

    def pin(self, keys: Iterable[str]) -> None:
        """Keys that are never evicted from now on, be they here already or not."""
        for key in sorted(set(keys) - self._pins):
            self._pins.add(key)
            entry = self._entries.get(key)
            if entry is not None and entry.settled:
                self._hold_back(entry)
                self.pinned_bytes += entry.size

    def unpin(self, keys: Iterable[str]) -> None:
        """Keys that may be evicted again."""
        for key in sorted(set(keys) & self._pins):
            self._pins.discard(key)
            self._refused.pop(key, None)
            entry = self._entries.get(key)
            if entry is not None and entry.settled:
                self.pinned_bytes -= entry.size
                self._let_go(entry)

    def _room(self) -> int:
        """What a new entry may take when all has gone that may go."""
        return self.capacity - self.used_bytes - self._leaving_bytes + self._evictable_bytes

    def _refuse(self, key: str) -> None:
        if key in self._pins:
            self.pins_refused += key not in self._refused
            self._refused[key] = self._room()

    def _let_go(self, entry: Entry) -> None:
        self._eviction.insert(entry.key, entry.size, entry.cost)
        self._evictable_bytes += entry.size

    def _hold_back(self, entry: Entry) -> None:
        self._eviction.remove(entry.key)
        self._evictable_bytes -= entry.size

    def _leave(self, key: str) -> Entry:
        entry = self._entries.pop(key)
        self.used_bytes -= entry.size
        self._leaving_bytes += entry.size
        return entry
