"""Leases on plans: a job is leased as a whole while its files are found out and written down, some at a time.

Until all are there (`is_planned`) nobody works on any of them. A plan that breaks off is forgotten and made again, or the job
fails; one that an API process was at, for a request that never was answered, fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from sqlalchemy import ColumnElement, delete, or_, select, update
from sqlalchemy.orm import Session

from ingest.jobs import ACTIVE, advance, cancel_waiting, lock_job, settle
from ingest.leases import LeaseLost, start_job
from storage.catalogue.engine import Catalogue
from storage.catalogue.lease import Heartbeat, lease_token, rotate
from storage.catalogue.schema import Document, Job, JobFile
from storage.errors import Cancelled

REQUEST_SECONDS = 60.0  # of a lease of a request that makes a job of very many files; renewed while it does


def has_plan(session: Session) -> bool:
    """Whether a job waits to be planned."""
    return session.scalars(select(Job.id).where(*_unplanned(time.time())).limit(1)).first() is not None


def _unplanned(now: float) -> list[ColumnElement[bool]]:
    return [
        Job.type == "sync",
        Job.stage == "fetch",
        Job.status.in_(("queued", "in_progress")),
        Job.lease_owner.is_(None),
        or_(Job.lease_expires.is_(None), Job.lease_expires <= now),
    ]


def claim_plan(
    catalogue: Catalogue, owner: str, seconds: float, *, last_tenant: str | None = None, busy: Collection[str] = ()
) -> Job | None:
    """Lease a sync job whose files are not known yet: of the tenant whose turn it is, and who is not `busy`, the oldest."""
    now = time.time()
    waiting = *_unplanned(now), Job.tenant_id.not_in(busy)
    with catalogue.read() as session:
        if session.scalars(select(Job.id).where(*waiting).limit(1)).first() is None:  # seen without anybody having to wait
            return None
    with catalogue.write() as session:
        tenant = rotate(session.scalars(select(Job.tenant_id).where(*waiting).distinct()).all(), last_tenant)
        query = select(Job).where(*waiting, Job.tenant_id == tenant).order_by(Job.created_at).limit(1)
        job = session.scalars(query.with_for_update(skip_locked=True)).first()
        if job is None:
            return None
        job.lease_owner, job.lease_expires = lease_token(owner), now + seconds
        start_job(session, job.id, now, job.attempt + 1)
        return job


def renew_plan(catalogue: Catalogue, job: Job, seconds: float) -> None:
    now = time.time()
    with catalogue.write() as session:
        session.execute(
            update(Job)
            .where(Job.id == job.id, Job.lease_owner == job.lease_owner)
            .values(lease_expires=now + seconds, last_heartbeat_at=now)
        )


def lease_plan(job: Job) -> None:
    """Let nobody else plan a job that has just been made: the files that are still lacking are known here."""
    job.lease_owner, job.lease_expires = lease_token("request"), time.time() + REQUEST_SECONDS


def renewed(catalogue: Catalogue, job: Job) -> Heartbeat:
    """Keeps the lease of `lease_plan` while its block runs."""
    return Heartbeat(lambda: renew_plan(catalogue, job, REQUEST_SECONDS), REQUEST_SECONDS / 3)


def end_plan(catalogue: Catalogue, job: Job) -> None:
    """All files of a leased job are there: let workers have them. Raises LeaseLost, Cancelled."""
    with catalogue.write() as session:
        row = owned_plan(session, job)
        row.lease_owner = row.lease_expires = None
        session.flush()
        advance(session, row.id, "extract")
        settle(session, row.id)


def let_go(catalogue: Catalogue, job: Job, end: Callable[[Session, Job], None]) -> None:
    """Give up the lease of a plan that was leased here, and `end` the job as it deserves; nothing where another has it now."""
    with catalogue.write() as session:
        row = lock_job(session, job.id)
        if row is None or row.lease_owner != job.lease_owner:
            return
        row.lease_owner = row.lease_expires = None
        end(session, row)
        settle(session, row.id)


def break_off(catalogue: Catalogue, job: Job, why: str | None) -> None:
    """End a job whose plan was leased here and comes to nothing: as failed, or cancelled if it was."""

    def end(session: Session, row: Job) -> None:
        if why is not None:
            fail_plan(session, row, "cancelled", why, retryable=False)

    let_go(catalogue, job, end)


def owned_plan(session: Session, job: Job) -> Job:
    """The leased job's row, locked. Raises LeaseLost or Cancelled."""
    row = lock_job(session, job.id)
    if row is None or row.lease_owner != job.lease_owner:
        raise LeaseLost("the lease on this job has expired")
    if row.status == "cancelling":
        raise Cancelled("the job was cancelled")
    return row


def reap_plans(session: Session, now: float) -> set[str]:
    """Return the jobs that dead workers were planning, or fail them after too many. Their ids, to be settled."""
    expired = session.scalars(
        select(Job)
        .where(Job.status.in_(ACTIVE), Job.lease_owner.is_not(None), Job.lease_expires < now)
        .with_for_update(skip_locked=True)
    ).all()
    for job in expired:
        if _can_be_planned(job):
            give_back_plan(session, job, "worker_lost", f"{job.attempt} workers died on this job")
        else:
            fail_plan(session, job, "worker_lost", "the server stopped before the request was answered; send it again", False)
    return {job.id for job in expired}


def _can_be_planned(job: Job) -> bool:
    """Whether a worker can find out the job's files: those of a manifest or an upload only the request knew."""
    return job.type == "sync" and not job.request.get("manifest")


def give_back_plan(session: Session, job: Job, code: str, message: str, delay: float = 0.0) -> None:
    """Let another run plan the job; after `max_attempts` of them the job fails."""
    job.lease_owner = None
    job.lease_expires = time.time() + delay if delay else None
    if job.attempt >= job.max_attempts:
        fail_plan(session, job, code, message)


def hand_over_plan(job: Job) -> None:
    """Let another worker plan the job at once; the attempt does not count."""
    job.lease_owner = job.lease_expires = None
    job.attempt = max(0, job.attempt - 1)


def fail_plan(session: Session, job: Job, code: str, message: str, retryable: bool = True) -> None:
    forget_plan(session, job.id)
    job.lease_owner = job.lease_expires = None
    job.result = {**job.result, "error": {"code": code, "message": message, "retryable": retryable}}


def forget_plan(session: Session, job_id: str) -> None:
    """Take back the files that an unfinished plan has written down: documents stay as they were, and those that were made for
    it go."""
    of_job = JobFile.job_id == job_id
    made = select(JobFile.document_id).where(of_job, JobFile.action == "upsert")
    others = select(JobFile.id).where(JobFile.document_id == Document.id, JobFile.job_id != job_id)
    new = delete(Document).where(Document.id.in_(made), Document.generation == 0, ~others.exists())
    cancel_waiting(session, select(JobFile.id).where(of_job, JobFile.status == "pending"), "the plan was not finished")
    for rows in (new, delete(JobFile).where(of_job)):
        session.execute(rows.execution_options(synchronize_session=False))
    session.expire_all()
