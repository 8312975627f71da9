"""The protocol of a tier, and what passes between tiers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from storage.format import decode
from storage.types import KVProfile, KVRecord, Miss

MAX_OBJECT_BYTES = 4 << 30  # whatever calls itself larger is not one of ours
# What was read is not what belongs under the key: worth computing again and putting in its place.
DAMAGE = frozenset({Miss.DAMAGED, Miss.WRONG_KEY, Miss.WRONG_LAYOUT})
# What every tier counts. Promotions: copies taken in; declined: no room, or writing rests; dropped: the queue was full.
COUNTS = (
    "hits", "misses", "damaged", "bytes_read", "bytes_written",
    "promotions", "promotions_declined", "promotions_dropped", "write_errors",
)  # fmt: skip
Fresh = Callable[[], bool]  # False once what was read may have been deleted since


@dataclass(frozen=True)
class Copy:
    """A verified record, and the parts of the object it stands in where they are at hand (none in memory)."""

    record: KVRecord
    encoded: Sequence[bytes | memoryview] = ()

    @property
    def nbytes(self) -> int:
        """What it keeps in memory, of record and object the larger: one may be a view of the other."""
        return max(self.record.kv.nbytes, sum(map(len, self.encoded)))


class Counts:
    """Named counters that threads share."""

    def __init__(self, names: Iterable[str]) -> None:
        self._counts = Counter(dict.fromkeys(names, 0))
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Tier(Protocol):
    """Where records can be read: an object store, a peer site. Safe to share between threads."""

    name: str  # as counters and answers have it

    def load(self, key: str, profile: KVProfile) -> Copy | Miss:
        """The record, verified, or why there is none. `key` is 64 hex digits. Never raises."""
        ...

    def counters(self) -> dict[str, int]:
        """A snapshot of COUNTS, and for a tier with a budget of what its ledger counts."""
        ...


class KeepingTier(Tier, Protocol):
    """A tier that keeps copies of what slower ones have."""

    counts: Counts

    def offer(self, copy: Copy, fresh: Fresh) -> bool:
        """Keep a copy, if there is room for it and `fresh()` still holds when it is taken in. Never raises."""
        ...


class CacheTier(KeepingTier, Protocol):
    """A tier within a budget of bytes, whose copies may go at any time. Nothing in it is anybody's only copy.

    A copy that turns out damaged is dropped, counted and reported as a miss. Calls other than `offer` and
    `forget` never wait for the medium, except `load` for its own bytes.
    """

    def touch(self, key: str) -> None:
        """A faster tier was asked for it, so that this one knows that it is in use."""
        ...

    def forget(self, keys: Collection[str]) -> None:
        """Drop these, and those of them that are being written: on return none is served any more."""
        ...

    def holds(self, key: str) -> bool: ...

    def keys(self) -> list[str]: ...

    def pin(self, keys: Collection[str]) -> None:
        """Never evict these, be they here or still to come. Their bytes count against the budget; where pins leave
        no room for one that comes, it is refused and counted."""
        ...

    def unpin(self, keys: Collection[str]) -> None: ...


def read_record(
    size: int, read_into: Callable[[memoryview], int], counts: Counts, key: str, profile: KVProfile
) -> Copy | Miss:
    """The object of `size` bytes that `read_into` fills a buffer with, decoded; counts the bytes."""
    if size > MAX_OBJECT_BYTES:
        return Miss.DAMAGED
    buffer = torch.empty(size, dtype=torch.uint8)
    view = buffer.numpy().data
    count = read_into(view)
    counts.add(bytes_read=count)
    outcome = decode(buffer, key, profile) if count == size else Miss.DAMAGED
    return Copy(outcome, (view,)) if isinstance(outcome, KVRecord) else outcome


def count_load(counts: Counts, outcome: Copy | Miss) -> None:
    """One `load`, as every tier counts it."""
    if isinstance(outcome, Copy):
        counts.add(hits=1)
    else:
        counts.add(misses=1, damaged=int(outcome in DAMAGE))
