"""The protocol of a tier, and what passes between tiers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from storage.codecs import Codec
from storage.format import DTYPES, decode
from storage.types import KVProfile, KVRecord, Miss

MAX_OBJECT_BYTES = 4 << 30  # whatever calls itself larger is not one of ours
# What was read is not what belongs under the key: worth computing again and putting in its place. A whole object of another
# profile is none: who computed it again would store the same, for a reader that asks for something else.
DAMAGE = frozenset({Miss.DAMAGED, Miss.WRONG_KEY})
# What every tier counts. Promotions: copies taken in; declined: no room, or writing rests; dropped: the queue was full.
COUNTS = (
    "hits", "misses", "damaged", "bytes_read", "bytes_written",
    "promotions", "promotions_declined", "promotions_dropped", "write_errors",
)  # fmt: skip
Fresh = Callable[[], bool]  # False once what was read may have been deleted since


@dataclass(frozen=True)
class Copy:
    """A verified record, and the parts of the object it stands in where they are at hand (none in memory).

    `codec`: through which its numbers have come, if that is another than the object's at home: a copy says so."""

    record: KVRecord
    encoded: Sequence[bytes | memoryview] = ()
    codec: str = ""

    @property
    def nbytes(self) -> int:
        """What it keeps in memory: record and object; of a raw one the larger, since one may be a view of the other."""
        record, encoded = self.record.kv.untyped_storage().nbytes(), sum(map(len, self.encoded))
        return max(record, encoded) if self.record.profile.codec == "raw" else record + encoded


class Held(NamedTuple):
    """A copy that lies in a tier: the bytes it takes there; `codec`: see Copy."""

    bytes: int
    codec: str = ""


class Extent(NamedTuple):
    """What a record takes, in bytes and at most: as an object, and in memory."""

    object: int
    record: int

    @staticmethod
    def of(profile: KVProfile, tokens: int, stored: int) -> Extent:
        """Of a record of so many tokens, whose object has `stored` bytes: one that is stored raw is a view of its object."""
        numbers = profile.layers * 2 * profile.kv_heads * tokens * profile.head_dim
        return Extent(stored, max(stored, numbers * DTYPES[profile.dtype].itemsize))


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
    """Where records can be read. Safe to share between threads."""

    name: str  # as counters and answers have it

    def load(self, key: str, profile: KVProfile, codec: Codec | None = None) -> Copy | Miss:
        """The record, verified, or why there is none. `key` is 64 hex digits. `codec`: the profile's; None: that of the
        table. Never raises."""
        ...

    def counters(self) -> dict[str, int]:
        """A snapshot of COUNTS, and for a tier with a budget of what its ledger counts."""
        ...


class CacheTier(Tier, Protocol):
    """A tier that keeps copies of what slower ones have within a budget of bytes; they may go at any time. Nothing in it is
    anybody's only copy.

    A copy that turns out damaged is dropped, counted and reported as a miss. Calls other than `offer` and
    `forget` never wait for the medium, except `load` for its own bytes.
    """

    counts: Counts

    def offer(self, copy: Copy, fresh: Fresh) -> bool:
        """Keep a copy, if there is room for it and `fresh()` still holds when it is taken in. Never raises."""
        ...

    def touch(self, key: str) -> None:
        """A faster tier was asked for it, so that this one knows that it is in use."""
        ...

    def forget(self, keys: Collection[str]) -> None:
        """Drop these, and those of them that are being written: on return none is served any more."""
        ...

    def holds(self, key: str) -> bool: ...

    def held(self) -> dict[str, Held]:
        """What lies here, by key."""
        ...

    def pin(self, keys: Collection[str]) -> None:
        """Never evict these, be they here or still to come. Their bytes count against the budget; where pins leave
        no room for one that comes, it is refused and counted."""
        ...

    def unpin(self, keys: Collection[str]) -> None: ...

    def takes(self, key: str, extent: Extent) -> bool:
        """Whether it is worth reading this key to offer it: False for a pin that has no room, which is counted."""
        ...

    def refused(self) -> set[str]:
        """The pinned keys that are not here for want of room."""
        ...


class _TooLarge(Exception):
    """Whatever has this size is not one of ours."""


def read_record(
    read_all: Callable[[Callable[[int], memoryview]], int],
    counts: Counts,
    key: str,
    profile: KVProfile,
    codec: Codec | None,
) -> Copy | Miss:
    """The object that `read_all(allocate)` reads into the memory it asks for, decoded; counts the bytes."""
    buffer = torch.empty(0, dtype=torch.uint8)

    def allocate(size: int) -> memoryview:
        nonlocal buffer
        if size > MAX_OBJECT_BYTES:
            raise _TooLarge
        buffer = torch.empty(size, dtype=torch.uint8)
        return buffer.numpy().data

    try:
        count = read_all(allocate)
    except _TooLarge:
        return Miss.DAMAGED
    counts.add(bytes_read=count)
    outcome = decode(buffer, key, profile, codec) if count == buffer.numel() else Miss.DAMAGED
    return Copy(outcome, (buffer.numpy().data,)) if isinstance(outcome, KVRecord) else outcome


def count_load(counts: Counts, outcome: Copy | Miss) -> None:
    """One `load`, as every tier counts it."""
    if isinstance(outcome, Copy):
        counts.add(hits=1)
    else:
        counts.add(misses=1, damaged=int(outcome in DAMAGE))
