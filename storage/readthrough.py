"""A local store in front of a parent's: what is not here is fetched, verified, kept and handed on."""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable
from storage.format import is_whole
from storage.tiers.store import object_name
from storage.types import ObjectInfo, ObjectStore

MAX_BYTES = 4 << 30  # whatever calls itself larger is not one of ours
_KV = "kv/"


def _is_named_by_content(data: memoryview, digest: str) -> bool:
    return hashlib.sha256(data).hexdigest() == digest


def _is_note(data: memoryview, purpose: str) -> bool:
    return re.fullmatch(rb"[0-9a-f]{64}", data) is not None


# What is read through, and how it is known to be what it is called: the bytes and the name's last word. Codecs' bases belong
# to a model, and a child takes its parent's: they are part of the KV's keys.
CHECKS: Mapping[str, Callable[[memoryview, str], bool]] = MappingProxyType(
    {_KV: is_whole, "basis/": _is_named_by_content, "basis-of/": _is_note}
)


class Parent(Protocol):
    """The reading half of an ObjectStore."""

    def size(self, name: str) -> int | None: ...

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int: ...


class Room(Protocol):
    """What of the parent's KV is kept here, by key; see `storage.catalogue.kept.Kept`."""

    def take(self, key: str, size: int) -> bool: ...

    def has_room(self, key: str) -> bool: ...

    def holds(self, key: str) -> bool: ...

    def forget(self, keys: Iterable[str]) -> None: ...


class Endless:
    """Room for everything."""

    def take(self, key: str, size: int) -> bool:
        return True

    def has_room(self, key: str) -> bool:
        return True

    def holds(self, key: str) -> bool:
        return True

    def forget(self, keys: Iterable[str]) -> None:
        """Nothing is remembered."""


class ReadThrough:
    """An ObjectStore: `local`, and KV objects and codecs' bases of `parent` where it has none. Safe to share between threads.

    What the parent sends is handed on only if it is a whole object of that name; it is asked once more for one that is
    not. `wanted(key)`: whether this site's catalogue still refers to the object. It is asked after an object was kept, so
    that one that was deleted while it was on its way does not stay. What `room` has no place for is handed on all the same.
    """

    def __init__(
        self, local: ObjectStore, parent: Parent, wanted: Callable[[str], bool], room: Room | None = None
    ) -> None:
        self._local, self._parent, self._wanted, self._room = local, parent, wanted, room or Endless()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """See ObjectStore. What is put is this site's own."""
        if name.startswith(_KV):
            self._room.forget([name.rpartition("/")[2]])
        return self._local.put(name, parts)

    def put_new(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """See ObjectStore. New is what is not here."""
        return self._local.put_new(name, parts)

    def delete(self, name: str) -> bool:
        """See ObjectStore. Here only: the parent's objects are its own."""
        return self._local.delete(name)

    def delete_many(self, names: Sequence[str]) -> dict[str, str]:
        """See ObjectStore. Here only."""
        return self._local.delete_many(names)

    def list(self, prefix: str) -> Iterator[str]:
        """See ObjectStore. What is here."""
        return self._local.list(prefix)

    def entries(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ObjectStore. What is here."""
        return self._local.entries(prefix)

    def sweep(self, older_than_s: float) -> int:
        """See ObjectStore."""
        return self._local.sweep(older_than_s)

    def size(self, name: str) -> int | None:
        """See ObjectStore."""
        size = self._local.size(name)
        if size is not None or not name.startswith(tuple(CHECKS)):
            return size
        with self._counted():
            return self._parent.size(name)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """See ObjectStore. Also raises StorageTimeout."""
        try:
            return self._local.read_into(name, buffer, offset)
        except ObjectMissing:
            if not name.startswith(tuple(CHECKS)):
                raise
        if not offset:  # as a rule this is all of it, and needs no second buffer
            with self._counted():
                count = self._parent.read_into(name, buffer)
            if self._accept(name, buffer[:count]):
                return count
        whole = self._fetch(name)[offset : offset + len(buffer)]
        buffer[: len(whole)] = whole
        return len(whole)

    def read_all(self, name: str, allocate: Callable[[int], memoryview]) -> int:
        """See ObjectStore. Also raises StorageTimeout."""
        try:
            return self._local.read_all(name, allocate)
        except ObjectMissing:
            if not name.startswith(tuple(CHECKS)):
                raise
        whole = self._fetch(name)
        allocate(len(whole))[:] = whole
        return len(whole)

    def pull(self, key: str) -> int:
        """Have a key's object here; the bytes fetched, 0 if it was here or there is no room but by another's leaving. Raises
        ObjectMissing, StorageUnavailable."""
        name = object_name(key)
        return 0 if self._local.size(name) is not None or not self._room.has_room(key) else len(self._fetch(name))

    def drop(self, key: str) -> None:
        """Delete a copy that turned out damaged, so that the parent's is fetched. Raises StorageUnavailable."""
        self._local.delete(object_name(key))
        self._room.forget([key])

    def counters(self) -> dict[str, int]:
        """A snapshot: objects, bytes, and of the failures: missing, timeout, unavailable, damaged, unkept."""
        names = ("objects", "bytes", "missing", "timeout", "unavailable", "damaged", "unkept")
        with self._lock:
            return {name: self._counts[name] for name in names}

    def _fetch(self, name: str) -> memoryview:
        """The whole object from the parent, verified and kept."""
        for _ in range(2):
            with self._counted():
                size = self._parent.size(name)
                if size is None:
                    raise ObjectMissing(f"no object {name}")
                if size > MAX_BYTES:
                    break
                buffer = torch.empty(size, dtype=torch.uint8).numpy().data
                count = self._parent.read_into(name, buffer)
            if count == size and self._accept(name, buffer):
                return buffer
        raise StorageUnavailable(f"object {name} did not arrive whole")

    def _accept(self, name: str, buffer: memoryview) -> bool:
        """Count and keep an object, if it is the one it ought to be."""
        kind, key = name.partition("/")[0] + "/", name.rpartition("/")[2]
        if not CHECKS[kind](buffer, key):
            self._count(damaged=1)
            return False
        self._count(objects=1, bytes=len(buffer))
        try:
            if kind == _KV and not self._room.take(key, len(buffer)):
                self._count(unkept=1)
                return True
            self._local.put(name, [buffer])
            if kind == _KV and not (self._wanted(key) and self._room.holds(key)):
                self._local.delete(name)
        except StorageUnavailable:  # it is read from the parent again next time
            self._count(unkept=1)
        return True

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except ObjectMissing:
            self._count(missing=1)
            raise
        except StorageUnavailable as error:
            self._count(**{"timeout" if isinstance(error, StorageTimeout) else "unavailable": 1})
            raise

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)
