"""The bases of transform codecs (`storage/codecs/basis.py`), looked after: which are whole, and which nothing names.

A basis is used by stored objects, whose headers name it, and by models, whose notes do. It is small, and few there are; but to
know that no object names one, the head of every object is read: so that is done when an operator asks, and not by the tick.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from ingest.garbage import GRACE_SECONDS, PARTS, Collected
from storage.codecs.shelf import BASES, NOTES, CodecShelf, basis_name
from storage.codecs.transform import PREFIX
from storage.errors import ObjectMissing, StorageUnavailable
from storage.types import Miss, ObjectStore

HEAD_BYTES = 4096  # in which an object's header names its codec: before its sections, whose number a model decides
READERS = 8
_NAMED = re.compile(re.escape(PREFIX.encode()) + rb"([0-9a-f]{64})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def noted(objects: ObjectStore) -> dict[str, str]:
    """Each note's name → the digest it holds, or whatever it holds. Raises StorageUnavailable."""
    return {name: _head(objects, name, 65).decode("ascii", "replace") for name in objects.list(NOTES)}


def broken(objects: ObjectStore) -> dict[str, str]:
    """The name of each basis that is stored or noted and cannot be used, and of each note that names none → "missing" or
    "damaged". Raises StorageUnavailable."""
    notes = noted(objects)
    found = {name: "damaged" for name, digest in notes.items() if not _DIGEST.fullmatch(digest)}
    stored = {name.removeprefix(BASES) for name in objects.list(BASES)}
    for digest in sorted(stored | set(notes.values())):
        if _DIGEST.fullmatch(digest) and (problem := _problem(objects, digest)):
            found[basis_name(digest)] = problem
    return found


def collect_bases(objects: ObjectStore, grace_s: float = GRACE_SECONDS) -> Collected:
    """Delete bases that no note and no stored object names, once they are old enough: who makes one puts it before it is noted.
    A process that has read one keeps it in memory. Raises StorageUnavailable, having deleted nothing."""
    notes, limit = set(noted(objects).values()), time.time() - grace_s
    unnoted = [info for info in objects.entries(BASES) if info.name.removeprefix(BASES) not in notes]
    old = {info.name.removeprefix(BASES): info for info in unnoted if info.modified <= limit}
    young = len(unnoted) - len(old)
    if old:
        for digest in named_by_objects(objects, old):
            del old[digest]
    left = objects.delete_many([info.name for info in old.values()])
    gone = [info for info in old.values() if info.name not in left]
    return Collected(len(gone), sum(info.size for info in gone), young)


def named_by_objects(objects: ObjectStore, digests: Iterable[str]) -> set[str]:
    """Those of these bases that a stored KV object names. Raises StorageUnavailable."""
    wanted, found = set(digests), set[str]()

    def named(name: str) -> list[str]:
        return [match.decode() for match in _NAMED.findall(_head(objects, name, HEAD_BYTES))]

    with ThreadPoolExecutor(READERS, thread_name_prefix="bases") as readers:
        for part in PARTS:
            if part.startswith("kv/") and not found >= wanted:
                for each in readers.map(named, list(objects.list(part))):
                    found.update(wanted.intersection(each))
    return found


def _problem(objects: ObjectStore, digest: str) -> str | None:
    codec = CodecShelf(objects).find(PREFIX + digest)
    if codec in (Miss.TIMEOUT, Miss.UNAVAILABLE):
        raise StorageUnavailable(f"object store: read a basis: {codec}")
    return None if not isinstance(codec, Miss) else "missing" if codec is Miss.ABSENT else "damaged"


def _head(objects: ObjectStore, name: str, size: int) -> bytes:
    """The first bytes; none of what has gone meanwhile."""
    buffer = bytearray(size)
    try:
        return bytes(buffer[: objects.read_into(name, memoryview(buffer))])
    except ObjectMissing:
        return b""
