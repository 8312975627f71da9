"""The KV queue's rows: claimed, renewed, ended, given back and reaped. Every change checks that the lease
still holds.

On a pending row `lease_expires` is the time before which it is not tried again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.orm import Session

from storage.catalogue.insert import insert_into
from storage.catalogue.lease import lease_token, rotate
from storage.catalogue.schema import ChunkRow, Corpus, Job, JobFile, KVObject
from storage.catalogue.usage import Place, add_usage
from storage.conditioning import Reading, readings
from storage.quota import is_full

MAX_ATTEMPTS = 3
MAX_ROWS = 256  # of one batch
ACTIVE = ("queued", "in_progress", "cancelling")


@dataclass(frozen=True)
class Owed:
    """One leased row: the KV of these tokens is to be stored under this key."""

    key: str
    sharing_group: str
    job_id: str | None
    token_ids: tuple[int, ...]
    before: tuple[tuple[int, ...], ...] = ()  # the chunks before it in its document's window, where they may matter


@dataclass(frozen=True)
class Batch:
    token: str
    tenant_id: str
    rows: tuple[Owed, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


def _due(now: float) -> list[ColumnElement[bool]]:
    return [
        KVObject.status == "pending",
        or_(KVObject.lease_expires.is_(None), KVObject.lease_expires <= now),
    ]


def has_work(session: Session) -> bool:
    """Whether a row could be claimed now."""
    return session.scalars(select(KVObject.key).where(*_due(time.time())).limit(1)).first() is not None


def claim(
    session: Session, owner: str, seconds: float, batch_tokens: int, last_tenant: str | None
) -> Batch | None:
    """Lease rows of the tenant whose turn it is, oldest first, up to `batch_tokens` but at least one."""
    now = time.time()
    tenants = session.scalars(select(KVObject.tenant_id).where(*_due(now)).distinct()).all()
    tenant = rotate([tenant for tenant in tenants if not _set_aside(session, tenant, now)], last_tenant)
    if tenant is None:
        return None
    query = select(KVObject).where(*_due(now), KVObject.tenant_id == tenant)
    # The rows of a document were made in its order, each a little later than the one before.
    query = query.order_by(KVObject.created_at, KVObject.key).limit(MAX_ROWS)
    found = session.scalars(query.with_for_update(skip_locked=True)).all()
    token = lease_token(owner)
    places = _places(session, [row.key for row in found])
    documents: dict[str, dict[int, Reading]] = {}
    taken: list[Owed] = []
    total = 0
    read: Reading = ()
    for row in found:
        place = places.get(row.key)
        if place is None:  # its last chunk has gone
            row.status, row.lease_expires = "purge", None
            continue
        if place.conditioned and place.document not in documents:
            documents[place.document] = _readings(session, place.document)
        whole = documents.get(place.document, {}).get(place.ordinal, (place.token_ids,))
        # What the row before was read behind is read once for both.
        again = whole[len(read) :] if whole[: len(read)] == read else whole
        cost = sum(map(len, again))
        if taken and total + cost > batch_tokens:
            break
        row.status, row.lease_owner, row.lease_expires = "leased", token, now + seconds
        taken.append(Owed(row.key, row.sharing_group, row.job_id, place.token_ids, whole[:-1]))
        total += cost
        read = whole
    return Batch(token, tenant, tuple(taken))


def _set_aside(session: Session, tenant_id: str, now: float) -> bool:
    """End what is due for a tenant that may store nothing more; whether that is so. Its chunks are computed when asked."""
    if not is_full(session, tenant_id):
        return False
    session.execute(update(KVObject).where(*_due(now), KVObject.tenant_id == tenant_id).values(status="over_quota"))
    return True


def _take_back(session: Session) -> None:
    """Owe again what was set aside for tenants that have room by now."""
    aside = KVObject.status == "over_quota"
    for tenant_id in session.scalars(select(KVObject.tenant_id).where(aside).distinct()).all():
        if not is_full(session, tenant_id):
            session.execute(update(KVObject).where(aside, KVObject.tenant_id == tenant_id).values(status="pending"))


@dataclass(frozen=True)
class _Place:
    document: str
    ordinal: int
    token_ids: tuple[int, ...]
    conditioned: bool  # its corpus was, at some time


def _places(session: Session, keys: Sequence[str]) -> dict[str, _Place]:
    """By key, the first chunk that refers to it."""
    first = select(func.min(ChunkRow.id)).where(ChunkRow.kv_key.in_(keys)).group_by(ChunkRow.kv_key)
    query = select(ChunkRow.kv_key, ChunkRow.document_id, ChunkRow.ordinal, ChunkRow.token_ids, Corpus.settings)
    query = query.join(Corpus, Corpus.id == ChunkRow.corpus_id).where(ChunkRow.id.in_(first))
    return {
        key: _Place(document, ordinal, _ids(token_ids), "conditioning" in settings)
        for key, document, ordinal, token_ids, settings in session.execute(query)
    }


def _readings(session: Session, document_id: str) -> dict[int, Reading]:
    """By ordinal, how the chunks of a conditioned document are read."""
    query = select(ChunkRow.ordinal, ChunkRow.token_ids).where(ChunkRow.document_id == document_id)
    rows = session.execute(query.order_by(ChunkRow.ordinal)).all()
    read = readings([_ids(row.token_ids) for row in rows], "document")
    return {row.ordinal: reading for row, reading in zip(rows, read, strict=True)}


def _ids(stored: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(stored) // 4}I", stored)


def is_wanted(session: Session, batch: Batch) -> bool:
    """Whether a row of the batch is still its own: what is cancelled, or has lost its lease, is not."""
    held = select(KVObject.key).where(
        KVObject.key.in_([owed.key for owed in batch.rows]), KVObject.status == "leased", KVObject.lease_owner == batch.token
    )
    return session.scalars(held.limit(1)).first() is not None


def renew(session: Session, tokens: Iterable[str], seconds: float) -> None:
    """Renew all that these leases hold, and the heartbeats of the jobs behind it."""
    now = time.time()
    held = KVObject.lease_owner.in_(list(tokens))
    jobs = sorted(filter(None, session.scalars(select(KVObject.job_id).where(held).distinct())))
    session.execute(update(Job).where(Job.id.in_(jobs), Job.status.in_(ACTIVE)).values(last_heartbeat_at=now))
    session.execute(
        update(KVObject).where(held, KVObject.status == "leased").values(lease_expires=now + seconds)
    )


def origins(session: Session, batch: Batch) -> list[str | None]:
    """The `traceparent` of each job that waits for the batch."""
    ids = {owed.job_id for owed in batch.rows}
    return [request.get("traceparent") for request in session.scalars(select(Job.request).where(Job.id.in_(ids)))]


def mark_done(session: Session, batch: Batch, written: Mapping[str, int], seconds: float) -> None:
    """End the rows whose objects are stored, and count them in their jobs."""
    for job_id in sorted({owed.job_id for owed in batch.rows if owed.job_id is not None}):
        session.get(
            Job, job_id, with_for_update=True, populate_existing=True
        )  # jobs before rows, as everywhere
    rows = _locked(session, written)
    counts: dict[str, dict[str, float]] = {}
    stored: list[str] = []
    for owed in batch.rows:
        row = rows.get(owed.key)
        if row is None or row.status != "leased" or row.lease_owner != batch.token:
            continue
        row.status, row.bytes, row.finished_at = "done", written[owed.key], time.time()
        row.lease_owner = row.lease_expires = None
        stored.append(owed.key)
        if owed.job_id is not None:
            count = counts.setdefault(owed.job_id, dict.fromkeys(("chunks", "bytes", "tokens", "seconds"), 0))
            count["chunks"] += 1
            count["bytes"] += row.bytes
            count["tokens"] += row.tokens
            count["seconds"] += seconds * row.tokens / max(1, batch.tokens)
    for job_id in sorted(counts):
        _count(session, job_id, counts[job_id])
    session.flush()
    add_usage(session, _spent(session, batch, stored, seconds))
    orphans = [owed for owed in batch.rows if owed.key in written and owed.key not in rows]
    if orphans:
        _bury(session, batch.tenant_id, orphans)


def _spent(session: Session, batch: Batch, keys: Sequence[str], seconds: float) -> dict[Place, dict[str, float]]:
    """What the batch cost, by corpus; a key that several corpora use counts for the one that was first."""
    first = select(func.min(ChunkRow.id)).where(ChunkRow.kv_key.in_(keys)).group_by(ChunkRow.kv_key)
    query = select(ChunkRow.kv_key, ChunkRow.corpus_id).where(ChunkRow.id.in_(first))
    corpora = dict(session.execute(query).all())
    day = int(time.time() // 86400)
    spent: dict[Place, dict[str, float]] = {}
    for owed in batch.rows:
        if owed.key in keys:
            place = (day, batch.tenant_id, corpora.get(owed.key, ""))
            amounts = spent.setdefault(place, {"tokens_compiled": 0, "seconds_compiled": 0.0})
            amounts["tokens_compiled"] += len(owed.token_ids)
            amounts["seconds_compiled"] += seconds * len(owed.token_ids) / max(1, batch.tokens)
    return spent


def mark_stored(session: Session, batch: Batch, stored: Mapping[str, int]) -> None:
    """End the rows whose objects another site stores: they are there to be read, and were not computed for this job."""
    for key, row in _locked(session, stored).items():
        if row.status == "leased" and row.lease_owner == batch.token:
            row.status, row.bytes, row.finished_at = "done", stored[key], time.time()
            row.lease_owner = row.lease_expires = None
    session.flush()


def _bury(session: Session, tenant_id: str, orphans: Sequence[Owed]) -> None:
    """Have objects deleted again whose rows were purged while they were being computed."""
    values = [
        {
            "key": owed.key,
            "tenant_id": tenant_id,
            "sharing_group": owed.sharing_group,
            "status": "purge",
            "tokens": len(owed.token_ids),
            "bytes": 0,
            "attempt": 0,
            "created_at": time.time(),
        }
        for owed in orphans
    ]
    session.execute(insert_into(session, KVObject).values(values).on_conflict_do_nothing())


def _count(session: Session, job_id: str, count: Mapping[str, float]) -> None:
    """Add to what a job that still runs has computed."""
    job = session.get(Job, job_id, with_for_update=True, populate_existing=True)
    if job is None or job.status not in ACTIVE:
        return
    before = job.result.get("kv", {})
    job.result = {**job.result, "kv": {name: before.get(name, 0) + value for name, value in count.items()}}
    job.last_heartbeat_at = time.time()


def give_back(
    session: Session, batch: Batch, keys: Iterable[str], *, blame: bool, delay: float = 0.0, max_attempts: int
) -> None:
    """Let another run try these rows. With `blame` it counts as an attempt, and the last one fails the
    row."""
    for row in _locked(session, keys).values():
        if row.status != "leased" or row.lease_owner != batch.token:
            continue
        _return_row(row, blame, delay, max_attempts)
    session.flush()


def _return_row(row: KVObject, blame: bool, delay: float, max_attempts: int) -> None:
    row.attempt += blame
    row.lease_owner = None
    row.status = "failed" if row.attempt >= max_attempts else "pending"
    row.lease_expires = time.time() + delay if delay and row.status == "pending" else None


def mark_failed(session: Session, batch: Batch, keys: Iterable[str]) -> None:
    """End rows that no attempt can help."""
    give_back(session, batch, keys, blame=True, max_attempts=0)


def _locked(session: Session, keys: Iterable[str]) -> dict[str, KVObject]:
    query = select(KVObject).where(KVObject.key.in_(list(keys))).order_by(KVObject.key).with_for_update()
    rows = session.scalars(query.execution_options(populate_existing=True))
    return {row.key: row for row in rows}


def reap(session: Session, max_attempts: int = MAX_ATTEMPTS) -> int:
    """Return what dead workers held; a row that has killed too many of them has failed. How many rows.

    And owe again what waited for its tenant to have room."""
    _take_back(session)
    expired = KVObject.status == "leased", KVObject.lease_expires < time.time()
    rows = session.scalars(select(KVObject).where(*expired).with_for_update(skip_locked=True)).all()
    for row in rows:
        _return_row(row, blame=True, delay=0.0, max_attempts=max_attempts)
    session.flush()
    return len(rows)


def request_repair(session: Session, key: str) -> bool:
    """Compute a stored object again that was found damaged or absent. False if it is not marked as stored."""
    changed: Any = session.execute(
        update(KVObject)
        .where(KVObject.key == key, KVObject.status == "done")
        .values(status="pending", attempt=0, job_id=None, lease_owner=None, lease_expires=None)
    )
    return bool(changed.rowcount)


def waiting_jobs(session: Session, keys: Sequence[str]) -> set[str]:
    """The jobs that have not ended and have a document with one of these chunks."""
    query = (
        select(JobFile.job_id)
        .join(ChunkRow, ChunkRow.document_id == JobFile.document_id)
        .join(Job, Job.id == JobFile.job_id)
        .where(ChunkRow.kv_key.in_(keys), Job.status.in_(ACTIVE))
    )
    return set(session.scalars(query.distinct()))
