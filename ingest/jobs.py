"""Jobs: created, cancelled, retried and settled. A job's end is derived from its rows, never declared by a
worker."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, func, select, update
from sqlalchemy.orm import Session

from ingest.job_view import errors_of, live_progress
from storage.catalogue.schema import ChunkRow, Corpus, Document, Job, JobFile, KVObject
from storage.errors import UserError

ACTIVE = ("queued", "in_progress", "cancelling")
OPEN_FILE = ("pending", "leased")
STAGES = ("fetch", "extract", "chunk", "embed", "kv", "commit")
MAX_ATTEMPTS = 3
SEPARATOR = "!/"  # between the path of an archive and that of a file in it


@dataclass(frozen=True)
class JobItem:
    """One file of a job to be: what is to happen to which document. An upsert without a file waits for its
    content."""

    path: str
    document_id: str | None
    file_id: str | None = None
    action: str = "upsert"  # upsert | delete | rename


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def attach(
    session: Session,
    corpus: Corpus,
    path: str,
    file_id: str,
    sha256: str,
    *,
    attributes: dict[str, Any] | None = None,
    access: list[Any] | None = None,
) -> Document:
    """The document at `path` of the corpus, made if there is none. Rights and attributes apply at once,
    its new content
    when a job has stored it; until then the old content answers, under its own file id."""
    document = session.scalars(
        select(Document).where(Document.corpus_id == corpus.id, Document.path == path).with_for_update()
    ).first()
    if document is None:
        document = Document(
            id=new_id("doc"),
            corpus_id=corpus.id,
            tenant_id=corpus.tenant_id,
            file_id=file_id,
            path=path,
            sha256=sha256,
            generation=0,
            status="in_progress",
            attributes={},
            created_at=time.time(),
        )
        session.add(document)
    if attributes is not None:
        document.attributes = attributes
    if access is not None:
        document.access = access
        _pass_on(session, document)
    document.status, document.error_code, document.error_message = "in_progress", None, None
    corpus.last_active_at = time.time()
    session.flush()
    return document


def _pass_on(session: Session, archive: Document) -> None:
    """The rights of an archive are those of the files in it."""
    prefix = archive.path + SEPARATOR
    inside = func.substr(Document.path, 1, len(prefix)) == prefix
    for member in session.scalars(select(Document).where(Document.corpus_id == archive.corpus_id, inside)):
        member.access = archive.access


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
    paths = [item.path for item in items]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise UserError(f"the path {twice!r} appears twice in one job; give each document its own path")
    job = Job(
        id=new_id("job"),
        tenant_id=tenant_id,
        corpus_id=corpus_id,
        type=type,
        status="queued",
        stage="extract" if planned else "fetch",
        request=request or {},
        result={},
        created_at=time.time(),
        attempt=0,
        max_attempts=MAX_ATTEMPTS,
    )
    session.add(job)
    session.flush()
    add_items(session, job, items)
    return job


def add_items(session: Session, job: Job, items: Sequence[JobItem]) -> None:
    """Add files to a job that has not ended."""
    session.add_all(
        JobFile(
            job_id=job.id,
            document_id=item.document_id,
            file_id=item.file_id,
            path=item.path,
            action=item.action,
            status="pending",
            attempt=0,
        )
        for item in items
    )
    session.flush()


def lock_job(session: Session, job_id: str) -> Job | None:
    """The job's row, locked until the transaction ends."""
    return session.get(Job, job_id, with_for_update=True, populate_existing=True)


def is_planned(job: Job) -> bool:
    return job.type != "sync" or job.stage != "fetch"


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
    waiting = select(JobFile).where(JobFile.job_id == job_id, JobFile.status == "pending")
    for row in session.scalars(
        waiting.with_for_update(skip_locked=True)
    ).all():  # others are just being claimed
        mark_cancelled(session, row)
    _disown_kv(session, job_id)
    settle(session, job_id)


def mark_cancelled(session: Session, row: JobFile, message: str = "the job was cancelled") -> None:
    """End a file as cancelled; a document that holds an older content keeps it and stays completed."""
    row.status, row.error_code, row.error_message = "cancelled", "cancelled", message
    row.lease_owner = row.lease_expires = None
    document = session.get(Document, row.document_id) if row.document_id else None
    if document is not None and row.action == "upsert":
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
    rows = session.scalars(select(JobFile).where(JobFile.job_id == job_id).order_by(JobFile.id)).all()
    request = {**job.request, "retry_of": job.id}
    if job.type == "sync" and "waiting" not in job.request:  # its source says what is still to do
        return create_job(
            session,
            tenant_id=job.tenant_id,
            corpus_id=job.corpus_id,
            type="sync",
            request=request,
            planned=False,
        )
    if only == "failed":
        named = {error["filename"] for error in errors_of(session, job, rows)}
        rows = [row for row in rows if row.path in named]
    if not rows:
        raise UserError("nothing to retry: no file of this job failed")
    items = [JobItem(row.path, row.document_id, row.file_id, row.action) for row in rows]
    return create_job(
        session,
        tenant_id=job.tenant_id,
        corpus_id=job.corpus_id,
        type=job.type,
        items=items,
        request=request,
    )


def owes_kv(session: Session, job_id: str) -> bool:
    """Whether a chunk of the job's documents still waits for its KV object."""
    owed = (
        select(KVObject.key)
        .join(ChunkRow, ChunkRow.kv_key == KVObject.key)
        .join(JobFile, JobFile.document_id == ChunkRow.document_id)
        .where(JobFile.job_id == job_id, KVObject.status.in_(OPEN_FILE))
    )
    return session.scalars(owed.limit(1)).first() is not None


def settle(session: Session, job_id: str) -> bool:
    """End the job if its rows say so; whether it has ended. Its last view is kept, so that it never
    changes again."""
    job = lock_job(session, job_id)
    if job is None or job.status not in ACTIVE:
        return True
    cancelling = job.status == "cancelling"
    if job.lease_owner is not None or (not is_planned(job) and not cancelling and "error" not in job.result):
        return False
    counts = _file_counts(session, job_id)
    if counts.get("pending", 0) + counts.get("leased", 0):
        return False
    if not cancelling and owes_kv(session, job_id):
        advance(session, job_id, "kv")
        return False
    _end(session, job, counts, cancelling)
    return True


def settle_all(session: Session) -> int:
    """Settle every job that has not ended; how many ended now."""
    ids = session.scalars(select(Job.id).where(Job.status.in_(ACTIVE))).all()
    return sum(settle(session, job_id) for job_id in ids)


def _file_counts(session: Session, job_id: str) -> dict[str, int]:
    rows = session.execute(
        select(JobFile.status, func.count()).where(JobFile.job_id == job_id).group_by(JobFile.status)
    )
    return {row[0]: row[1] for row in rows}


def _end(session: Session, job: Job, counts: dict[str, int], cancelling: bool) -> None:
    rows = session.scalars(select(JobFile).where(JobFile.job_id == job.id).order_by(JobFile.id)).all()
    errors = errors_of(session, job, rows)
    lost = counts.get("failed", 0) + counts.get("cancelled", 0)
    if cancelling:
        job.status = "cancelled"
    elif "error" in job.result or (rows and lost == len(rows)):
        job.status = "failed"
    else:
        job.status = "completed_with_errors" if errors else "completed"
    job.finished_at = time.time()
    job.stage = "commit" if job.status.startswith("completed") else job.stage
    final = {"progress": {**live_progress(session, job), "eta_seconds": 0.0}, "errors": errors}
    job.result = {**job.result, "final": final}
