"""Orphans: objects that no row of the catalogue knows, left by a crash, a restored backup or a deleted tenant; and files
that nothing needs, left by who died between storing them and saying what for.

Whether an object is in use is asked of the catalogue every time; nothing counts references. An object may be older than its
row by the time it takes to write the row, so only what has lain for a grace time is taken.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import literal, or_, select
from sqlalchemy.orm import Session

from ingest.files import PART, SOURCE_PURPOSE, drop_source_files, owner_part
from ingest.jobs import OPEN_FILE
from storage.catalogue.engine import Catalogue
from storage.catalogue.insert import insert_into
from storage.catalogue.schema import Document, DocumentVersion, File, JobFile, KVObject, Tenant, Upload
from storage.errors import StorageUnavailable
from storage.types import ObjectInfo, ObjectStore

GRACE_SECONDS = 24 * 3600.0
MOST = 1000  # orphans taken from one part at a time
EVERY_SECONDS = 30.0  # one part of the store per process
LEFT_SECONDS = 3600.0  # after which a file that nothing needs was left behind by who stored it
LEFT_EVERY = 16  # parts
# The store by parts that can be listed by themselves: a two hundred and fifty-sixth of the KV, a sixteenth of the files.
PARTS = (*(f"kv/{number:02x}/" for number in range(256)), *(f"raw/{number:x}" for number in range(16)))

_KV = re.compile(r"kv/([0-9a-f]{2})/(\1[0-9a-f]{62})")
_RAW = re.compile(r"raw/([0-9a-f]{32})/([0-9a-f]{64})")


@dataclass(frozen=True)
class Collected:
    """What `collect` found: orphans it took, their bytes, and orphans that are too young to be taken."""

    taken: int = 0
    bytes: int = 0
    young: int = 0

    def __add__(self, other: Collected) -> Collected:
        return Collected(self.taken + other.taken, self.bytes + other.bytes, self.young + other.young)


def orphans(catalogue: Catalogue, infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Those of these objects that no row knows. What is not named like one of ours is nobody's orphan."""
    keys = {match[2]: info for info in infos if (match := _KV.fullmatch(info.name))}
    files = {(match[1], match[2]): info for info in infos if (match := _RAW.fullmatch(info.name))}
    with catalogue.read() as session:
        known = set(session.scalars(select(KVObject.key).where(KVObject.key.in_(keys))))
        rows = session.execute(select(File.tenant_id, File.sha256).where(File.sha256.in_({sha for _, sha in files})))
        held = {(owner_part(tenant_id), sha256) for tenant_id, sha256 in rows}
    return [info for key, info in keys.items() if key not in known] + [
        info for place, info in files.items() if place not in held
    ]


def collect(
    catalogue: Catalogue, objects: ObjectStore, part: str, *, grace_s: float = GRACE_SECONDS, most: int = MOST
) -> Collected:
    """Take the orphans of one part. KV is handed to the purge queue, whose sweep deletes it. Raises StorageUnavailable."""
    limit = time.time() - grace_s
    found = Collected()
    for infos in _batches(objects.entries(part)):
        lost = orphans(catalogue, infos)
        old = [info for info in lost if info.modified <= limit][: most - found.taken]
        taken = _bury_kv(catalogue, old) if part.startswith("kv/") else _delete_raw(catalogue, objects, old)
        young = sum(info.modified > limit for info in lost)
        found += Collected(len(taken), sum(info.size for info in taken), young)
        if found.taken >= most:
            break
    return found


def _bury_kv(catalogue: Catalogue, old: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
    """Give them rows that say "purge": from there on the rules for any deletion hold (`purge.py`), so that a chunk
    that comes back at this moment takes the row back, or finds nothing and computes anew."""
    if not old:
        return []
    now = time.time()
    shared = {"tenant_id": "", "sharing_group": "", "status": "purge", "tokens": 0, "bytes": 0, "attempt": 0}
    rows = [{"key": info.name.rpartition("/")[2], "created_at": now, **shared} for info in old]
    with catalogue.write() as session:
        insert = insert_into(session, KVObject).values(rows).on_conflict_do_nothing().returning(KVObject.key)
        buried = set(session.scalars(insert))
    return [info for info in old if info.name.rpartition("/")[2] in buried]


def _delete_raw(catalogue: Catalogue, objects: ObjectStore, old: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
    taken: list[ObjectInfo] = []
    if not old:
        return taken
    with catalogue.read() as session:
        tenants = {owner_part(tenant_id): tenant_id for tenant_id in session.scalars(select(Tenant.id))}
    for owner in sorted({info.name.split("/")[1] for info in old}):
        theirs = [info for info in old if info.name.split("/")[1] == owner]
        with catalogue.write() as session:
            free = _unused(session, tenants.get(owner), theirs)
            left = objects.delete_many([info.name for info in free])
        taken += [info for info in free if info.name not in left]
    return taken


def _unused(session: Session, tenant_id: str | None, infos: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Those that have no row even now. Until the transaction ends none can get one: a file's row refers to its tenant's,
    which is locked; an upload that waits for it looks for its object afterwards, and stores it again."""
    if tenant_id is None:
        return list(infos)
    session.get(Tenant, tenant_id, with_for_update=True)
    hashes = [info.name.rpartition("/")[2] for info in infos]
    query = select(File.sha256).where(File.tenant_id == tenant_id, File.sha256.in_(hashes))
    used = set(session.scalars(query))
    return [info for info in infos if info.name.rpartition("/")[2] not in used]


def drop_leftovers(catalogue: Catalogue, objects: ObjectStore, *, grace_s: float = LEFT_SECONDS, most: int = MOST) -> int:
    """Forget files that a sync, an archive or an upload has stored and nothing came to need: whoever stored them was killed
    before it could say so. Whoever is still at it finds them gone and stores them again (`files.hold`). How many."""
    needed = (Document.file_id, DocumentVersion.file_id)
    waiting = select(JobFile.file_id).where(JobFile.status.in_(OPEN_FILE), JobFile.file_id.is_not(None))
    parts = select(literal(PART) + Upload.id).where(Upload.status == "pending")  # those have an end of their own
    left = (
        select(File.id, File.tenant_id)
        .where(or_(File.purpose == SOURCE_PURPOSE, File.purpose.startswith(PART)), File.created_at < time.time() - grace_s)
        .where(*(~select(column).where(column == File.id).exists() for column in needed))
        .where(File.id.not_in(waiting), File.purpose.not_in(parts))
        .limit(most)
    )
    with catalogue.read() as session:
        found = session.execute(left).all()
    return sum(drop_source_files(catalogue, objects, tenant_id, [file_id]) for file_id, tenant_id in found)


def _batches(infos: Iterable[ObjectInfo], size: int = 500) -> Iterable[list[ObjectInfo]]:
    batch: list[ObjectInfo] = []
    for info in infos:
        batch.append(info)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


class Collector:
    """Collects as part of the tick: one part of the store at a time, and rarely."""

    def __init__(
        self, catalogue: Catalogue, open_objects: Callable[[], ObjectStore], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_objects` is asked for the store when it is time, so that a store that is down holds up no tick before."""
        self._catalogue, self._open_objects, self._clock = catalogue, open_objects, clock
        self._part = random.randrange(len(PARTS))  # processes that are started often reach every part all the same
        self._due = clock() + EVERY_SECONDS

    def tick(self) -> Collected:
        """Take the next part if it is time; a store that does not answer is asked for the next part next time."""
        if self._clock() < self._due:
            return Collected()
        self._due = self._clock() + EVERY_SECONDS
        self._part = (self._part + 1) % len(PARTS)
        try:
            objects = self._open_objects()
            if self._part == 0:
                objects.sweep(GRACE_SECONDS)
            if self._part % LEFT_EVERY == 0:
                drop_leftovers(self._catalogue, objects)
            return collect(self._catalogue, objects, PARTS[self._part])
        except StorageUnavailable:
            return Collected()
