"""Jobs: created, cancelled, retried and settled. A job's end is derived from its rows, never declared by a
worker."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from sqlalchemy import Select, case, exists, select, update
from sqlalchemy.orm import Session

from ingest.job_end import end_job, owes_kv
from ingest.job_view import failed_files
from storage.catalogue.schema import ChunkRow, Corpus, Document, Job, JobFile, KVObject
from storage.errors import UserError
from storage.tracing import outgoing

T = TypeVar("T")
log = structlog.get_logger()
ACTIVE = ("queued", "in_progress", "cancelling")
OPEN_FILE = ("pending", "leased")
STAGES = ("fetch", "extract", "chunk", "embed", "kv", "commit")
WITH_CONTENT = ("upsert", "refresh")  # actions that end in a document's next generation
MAX_ATTEMPTS = 3
ORIGIN = ("request_id", "traceparent")  # in a job's request: which one made it


@dataclass(frozen=True)
class JobItem:
    """One file of a job to be: what is to happen to which document. Without a file it waits for the content whose
    hash is `sha256`."""

    path: str
    document_id: str | None
    file_id: str | None = None
    action: str = "upsert"  # upsert | refresh (what the document holds by then) | delete | rename | reindex
    sha256: str | None = None


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def asked_by(names: Collection[str]) -> dict[str, Any]:
    """Of a job's request: what its asker is known by, for documents that only its work will name."""
    return {"names": sorted(names)}


def create_job(
    session: Session,
    *,
    tenant_id: str,
    corpus_id: str | None,
    type: str,
    items: Sequence[JobItem] = (),
    request: dict[str, Any] | None = None,
    planned: bool = True,
) -> Job:
    """A queued job over `items`. With planned=False a worker finds out the items first. Raises UserError
    if two items
    have one path."""
    check_paths([item.path for item in items])
    job = Job(
        id=new_id("job"),
        tenant_id=tenant_id,
        corpus_id=corpus_id,
        type=type,
        status="queued",
        stage="extract" if planned else "fetch",
        request={name: value for name, value in (request or {}).items() if name not in ORIGIN} | _origin(),
        result={},
        created_at=time.time(),
        attempt=0,
        max_attempts=MAX_ATTEMPTS,
    )
    session.add(job)
    session.flush()
    add_items(session, job, items)
    log.info("job_created", job=job.id, type=type)  # by the request whose id this line has
    return job


def check_paths(paths: Sequence[str]) -> None:
    """Raises UserError if one appears twice."""
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UserError(f"the path {twice!r} appears twice in one job; give each document its own path")


def queue_refresh(session: Session, corpus: Corpus, documents: Iterable[Document]) -> Job:
    """A job that makes these documents of the corpus anew, of what they hold when it comes to them: a content that is on its
    way now is not undone. Those that are as we make them now cost nothing, but for stored KV that they lack."""
    items = [JobItem(document.path, document.id, action="refresh") for document in documents]
    return create_job(session, tenant_id=corpus.tenant_id, corpus_id=corpus.id, type="precompute", items=items)


def _origin() -> dict[str, str]:
    """Of which request and trace the job is: for its worker's log lines and spans."""
    origin = structlog.contextvars.get_contextvars().get("request_id"), outgoing()
    return {name: value for name, value in zip(ORIGIN, origin, strict=True) if value}


def add_items(session: Session, job: Job, items: Sequence[JobItem]) -> None:
    """Add files to a job that has not ended."""
    session.add_all(
        JobFile(
            job_id=job.id,
            document_id=item.document_id,
            file_id=item.file_id,
            path=item.path,
            sha256=item.sha256,
            action=item.action,
            status="pending",
            attempt=0,
        )
        for item in items
    )
    session.flush()


def lock_job(session: Session, job_id: str) -> Job | None:
    """The job's row, locked until the transaction ends. It is read once: what is locked nobody else changes."""
    locked: set[str] = session.info.setdefault("locked_jobs", set())
    if job_id in locked:
        return session.get(Job, job_id)
    locked.add(job_id)
    return session.get(Job, job_id, with_for_update=True, populate_existing=True)


def is_planned(job: Job) -> bool:
    """Whether all its files are known: until then nobody works on any of them."""
    return job.stage != "fetch"


def advance(session: Session, job_id: str, stage: str) -> None:
    """Move the job's stage forward; it never goes back."""
    job = lock_job(session, job_id)
    if job is not None and job.status in ACTIVE and STAGES.index(stage) > STAGES.index(job.stage):
        job.stage = stage


def cancel(session: Session, job_id: str) -> None:
    """Tell a job to stop: what waits is cancelled now, what runs reads the flag. A job that ended stays as
    it is."""
    job = lock_job(session, job_id)
    if job is None or job.status not in ACTIVE:
        return
    job.status = "cancelling"
    waiting = select(JobFile.id).where(JobFile.job_id == job_id, JobFile.status == "pending")
    cancel_waiting(session, waiting, "the job was cancelled")
    _disown_kv(session, job_id)
    settle(session, job_id)


def cancel_waiting(session: Session, waiting: Select[int], message: str) -> int:
    """End all files of a query of ids as cancelled, as `mark_cancelled` does one; how many. Those that are just being
    claimed are passed over: who claims them reads the job's flag."""
    session.flush()
    ids = session.scalars(waiting.with_for_update(of=JobFile, skip_locked=True)).all()
    ended = {"status": "cancelled", "error_code": "cancelled", "error_message": message, "lease_expires": None}
    for some in batches(ids):
        session.execute(_update(JobFile).where(JobFile.id.in_(some)).values(lease_owner=None, **ended))
        upserts = select(JobFile.document_id).where(JobFile.id.in_(some), JobFile.action.in_(WITH_CONTENT))
        kept = case((Document.generation > 0, "completed"), else_="cancelled")
        session.execute(_update(Document).where(Document.id.in_(upserts)).values(status=kept))
    session.expire_all()
    return len(ids)


def batches(some: Sequence[T], size: int = 500) -> Iterable[Sequence[T]]:
    return (some[start : start + size] for start in range(0, len(some), size))


def _update(table: type[Any]) -> Any:
    return update(table).execution_options(synchronize_session=False)


def mark_cancelled(session: Session, row: JobFile, message: str = "the job was cancelled") -> None:
    """End a file as cancelled; a document that holds an older content keeps it and stays completed."""
    row.status, row.error_code, row.error_message = "cancelled", "cancelled", message
    row.lease_owner = row.lease_expires = None
    document = session.get(Document, row.document_id) if row.document_id else None
    if document is not None and row.action in WITH_CONTENT:
        document.status = "completed" if document.generation else "cancelled"


def _disown_kv(session: Session, job_id: str) -> None:
    """Drop the KV work that only this job waits for. The chunks stay searchable and are computed when
    asked."""
    other = (
        select(ChunkRow.id)
        .join(JobFile, JobFile.document_id == ChunkRow.document_id)
        .join(Job, Job.id == JobFile.job_id)
        .where(ChunkRow.kv_key == KVObject.key, Job.id != job_id, Job.status.in_(("queued", "in_progress")))
    )
    session.execute(
        update(KVObject)
        .where(KVObject.job_id == job_id, KVObject.status.in_(OPEN_FILE), ~exists(other))
        .values(status="purge", lease_owner=None, lease_expires=None)
        .execution_options(synchronize_session=False)
    )


def retry(session: Session, job_id: str, only: str = "failed") -> Job:
    """A new job over the files of an ended one: those named in its errors, or with only="all" every one."""
    job = session.get(Job, job_id)
    if job is None or job.status in ACTIVE:
        raise UserError("only a job that has ended can be retried")
    if only == "failed" and job.status == "completed":
        raise UserError("nothing to retry: no file of this job failed")
    request = {**job.request, "retry_of": job.id}
    if job.type == "sync" and not job.request.get("manifest"):  # its source says what is still to do
        return create_job(
            session,
            tenant_id=job.tenant_id,
            corpus_id=job.corpus_id,
            type="sync",
            request=request,
            planned=False,
        )
    query = select(JobFile).where(JobFile.job_id == job_id).order_by(JobFile.id)
    rows = session.scalars(query.where(failed_files(job_id)) if only == "failed" else query).all()
    if not rows:
        raise UserError("nothing to retry: no file of this job failed")
    items = [JobItem(row.path, row.document_id, row.file_id, row.action, row.sha256) for row in rows]
    return create_job(
        session,
        tenant_id=job.tenant_id,
        corpus_id=job.corpus_id,
        type=job.type,
        items=items,
        request=request,
    )


def settle(session: Session, job_id: str) -> bool:
    """End the job if its rows say so; whether it has ended. Its last view is kept, so that it never
    changes again."""
    job = lock_job(session, job_id)
    if job is None or job.status not in ACTIVE:
        return True
    cancelling = job.status == "cancelling"
    if job.lease_owner is not None or (not is_planned(job) and not cancelling and "error" not in job.result):
        return False
    session.flush()
    open_files = select(JobFile.id).where(JobFile.job_id == job_id, JobFile.status.in_(OPEN_FILE))
    if session.scalars(open_files.limit(1)).first() is not None:
        return False
    if not cancelling and owes_kv(session, job_id):
        advance(session, job_id, "kv")
        return False
    end_job(session, job, cancelled=cancelling)
    return True
