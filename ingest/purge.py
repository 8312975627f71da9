"""KV objects that are owed, and those that nothing needs any more. Both are rows first and objects later.

A row goes to `purge` in the transaction that removes its last chunk; the object follows, and then the row.
So a crash
or a store that is down delays a deletion and never forgets it; and a chunk that comes back in between
takes the row
back before the object is gone, or finds no row and computes anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from ingest.types import KVDelete
from storage.catalogue.engine import Catalogue
from storage.catalogue.insert import insert_into
from storage.catalogue.schema import ChunkRow, KVObject, VersionChunk
from storage.catalogue.tombstones import bury
from storage.errors import StorageUnavailable

BATCH = 200


def _batches(keys: Iterable[str]) -> Iterable[list[str]]:
    ordered = sorted(set(keys))  # one order for all, so that two transactions never wait for each other
    return (ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH))


def owe(
    session: Session, tokens: Mapping[str, int], tenant_id: str, sharing_group: str, job_id: str
) -> tuple[set[str], int]:
    """See to it that each key has a row. The keys that `job_id` now owes, and the bytes stored under the
    others.

    Rows are worked on by age, so those of a document are each a microsecond younger than the one before."""
    now = time.time()
    born = {key: now + 1e-6 * number for number, key in enumerate(tokens)}
    owed: set[str] = set()
    reused = 0
    for keys in _batches(tokens):
        rows = [_new_row(key, tokens[key], tenant_id, sharing_group, job_id, born[key]) for key in keys]
        owed.update(session.scalars(_insert_missing(session, rows)))
        query = select(KVObject).where(KVObject.key.in_(keys)).order_by(KVObject.key).with_for_update()
        for row in session.scalars(query.execution_options(populate_existing=True)):
            if row.status in ("failed", "over_quota", "purge"):
                row.tenant_id, row.sharing_group = tenant_id, sharing_group  # a collected orphan has none
                row.status, row.job_id, row.attempt = "pending", job_id, 0
                row.lease_owner = row.lease_expires = row.finished_at = None
                owed.add(row.key)
            elif row.key not in owed:
                reused += row.bytes
    session.flush()
    return owed, reused


def _new_row(
    key: str, tokens: int, tenant_id: str, group: str, job_id: str, born: float
) -> dict[str, Any]:
    return {
        "key": key,
        "tenant_id": tenant_id,
        "sharing_group": group,
        "job_id": job_id,
        "status": "pending",
        "tokens": tokens,
        "bytes": 0,
        "attempt": 0,
        "created_at": born,
    }


def _insert_missing(session: Session, rows: list[dict[str, Any]]) -> Any:
    return insert_into(session, KVObject).values(rows).on_conflict_do_nothing().returning(KVObject.key)


def release(session: Session, keys: Iterable[str]) -> tuple[int, int]:
    """Mark for deletion what no chunk refers to any more: (how many were marked, how many are kept)."""
    marked = kept = 0
    for batch in _batches(keys):
        query = select(KVObject).where(KVObject.key.in_(batch)).order_by(KVObject.key).with_for_update()
        rows = session.scalars(query.execution_options(populate_existing=True)).all()
        bury(session, rows)
        used = {
            key
            for table in (ChunkRow, VersionChunk)
            for key in session.scalars(select(table.kv_key).where(table.kv_key.in_(batch)).distinct())
        }
        for row in rows:
            if row.key in used:
                kept += 1
            elif row.status != "purge":
                row.status, row.lease_owner, row.lease_expires = "purge", None, None
                marked += 1
    session.flush()
    return marked, kept


def sweep(catalogue: Catalogue, kv_delete: KVDelete) -> int:
    """Delete the objects that are marked, then their rows; how many. Raises StorageUnavailable: what is left stays marked,
    and one object that the store will not delete holds up no other."""
    swept, left, after = 0, 0, ""
    while True:
        with catalogue.write() as session:
            query = select(KVObject.key).where(KVObject.status == "purge", KVObject.key > after)
            query = query.order_by(KVObject.key).limit(BATCH)
            keys = list(session.scalars(query.with_for_update(skip_locked=True)))
            if not keys:
                break
            refused = set(kv_delete(keys))
            gone = [key for key in keys if key not in refused]
            session.execute(delete(KVObject).where(KVObject.key.in_(gone)))
        swept, left, after = swept + len(gone), left + len(refused), keys[-1]
    if left:
        raise StorageUnavailable(f"the object store would not delete {left} objects")
    return swept


def try_sweep(catalogue: Catalogue, kv_delete: KVDelete) -> int:
    """Sweep now if the store answers; the next tick tries again what is left."""
    try:
        return sweep(catalogue, kv_delete)
    except StorageUnavailable:
        return 0
