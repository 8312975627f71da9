"""An object store as a tier: the home of all records."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from storage.codecs import Codec
from storage.errors import ObjectMissing, StorageUnavailable
from storage.tiers.types import COUNTS, Copy, Counts, count_load, read_record
from storage.types import KVProfile, Miss, ObjectStore, miss_of


class StoreTier:
    """A Tier over any ObjectStore, without a budget."""

    def __init__(self, name: str, objects: ObjectStore) -> None:
        self.name = name
        self.counts = Counts(COUNTS)
        self._objects = objects

    def load(self, key: str, profile: KVProfile, codec: Codec | None = None) -> Copy | Miss:
        """See Tier. What is damaged stays: whoever puts the record again repairs it in place."""
        found = self._load(key, profile, codec)
        count_load(self.counts, found)
        return found

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> int:
        """Store an object; the bytes written. Raises StorageUnavailable."""
        written = self._objects.put(object_name(key), parts)
        self.counts.add(bytes_written=written)
        return written

    def delete(self, keys: Collection[str]) -> set[str]:
        """The keys whose objects are still there. Raises StorageUnavailable, where some may be deleted."""
        names = {object_name(key): key for key in keys}
        return {names[name] for name in self._objects.delete_many(list(names))}

    def counters(self) -> dict[str, int]:
        """See Tier."""
        return self.counts.snapshot()

    def _load(self, key: str, profile: KVProfile, codec: Codec | None) -> Copy | Miss:
        name = object_name(key)
        try:
            return read_record(partial(self._objects.read_all, name), self.counts, key, profile, codec)
        except (ObjectMissing, StorageUnavailable) as error:
            return miss_of(error)


def object_name(key: str) -> str:
    """Where the record of `key` lies in an object store."""
    return f"kv/{key[:2]}/{key}"
