"""Leases on a job's files: claimed in turn, renewed by a heartbeat, reaped when a worker is dead.

A row that waits is never touched by the reaper: only a lease can expire. On a pending row `lease_expires`
is the time before which it is not tried again.

Whoever locks several rows locks jobs first, then their files, then documents, then KV objects: so that
PostgreSQL never finds two of us waiting for each other.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

from sqlalchemy import ColumnElement, Float, and_, bindparam, or_, select, update
from sqlalchemy.orm import Session, aliased

from ingest.jobs import ACTIVE, OPEN_FILE, ORIGIN, WITH_CONTENT, lock_job, mark_cancelled, settle
from storage.catalogue.engine import Catalogue
from storage.catalogue.lease import Heartbeat, lease_token, rotate
from storage.catalogue.schema import Document, Job, JobFile
from storage.errors import Cancelled, Stopping

MOST_WORKERS = 64  # jobs whose only file another worker is just claiming may stand before one with a free file
CANCEL_SECONDS = 0.25  # how often running work looks at its cancel flag


class LeaseLost(Cancelled):
    """Another worker may hold the file by now: nothing of this run may be stored."""


@dataclass(frozen=True)
class FileLease:
    job_file_id: int
    job_id: str
    tenant_id: str
    token: str
    attempt: int = 0  # runs of the file that have failed
    request_id: str | None = None  # of the request that made the job
    traceparent: str | None = None  # and of its trace


@cache
def _claimable() -> ColumnElement[bool]:
    """Files that may be worked on `now`: due, with content, and not behind an older file of the same document (which has
    come by its own). Made once: for a small file making it took longer than asking it."""
    older = aliased(JobFile)
    behind = select(older.id).where(
        older.document_id == JobFile.document_id,
        older.id < JobFile.id,
        older.status.in_(OPEN_FILE),
        _has_what_it_needs(older),
    )
    return and_(
        JobFile.status == "pending",
        or_(JobFile.lease_expires.is_(None), JobFile.lease_expires <= bindparam("now", type_=Float)),
        _has_what_it_needs(JobFile),
        ~behind.correlate(JobFile).exists(),
    )


def _has_what_it_needs(file: Any) -> ColumnElement[bool]:
    """Its content has come, or it is about chunks that are there."""
    return or_(file.file_id.is_not(None), file.action.in_(("refresh", "reindex")))


def _runs() -> ColumnElement[bool]:
    """Jobs whose files are known, and may be worked on."""
    return and_(Job.status.in_(("queued", "in_progress")), Job.stage != "fetch")


@cache
def _has_claimable() -> ColumnElement[bool]:
    files = select(JobFile.id).where(JobFile.job_id == Job.id, _claimable())
    return files.correlate(Job).exists()


def claim_file(
    catalogue: Catalogue,
    owner: str,
    seconds: float,
    *,
    last_tenant: str | None = None,
    busy: Collection[str] = (),
    ahead: bool = False,
) -> FileLease | None:
    """Lease the next file: of the tenant whose turn it is, and who is not `busy`, of its oldest job. None if nothing is due,
    or if the next one has failed before and is claimed `ahead`, beside another file: it is to be alone."""
    now = time.time()
    running = _runs()
    with catalogue.write() as session:
        waiting = select(Job.tenant_id).where(running, Job.tenant_id.not_in(busy), _has_claimable()).distinct()
        tenant = rotate(session.scalars(waiting, {"now": now}).all(), last_tenant)
        row = _first_file(session, [running, Job.tenant_id == tenant], now)
        if row is None or tenant is None or (ahead and row.attempt > 0):
            return None
        row.status, row.lease_owner, row.lease_expires = "leased", lease_token(owner), now + seconds
        job = start_job(session, row.job_id, now, row.attempt + 1)
        origin = [job.request.get(name) if job else None for name in ORIGIN]
        return FileLease(row.id, row.job_id, tenant, row.lease_owner, row.attempt, *origin)


def _first_file(session: Session, jobs: list[ColumnElement[bool]], now: float) -> JobFile | None:
    """The oldest job's first file, locked. A job at a time: the index has its files in order, and those of all jobs
    together would have to be sorted."""
    waiting = select(Job.id).where(*jobs, _has_claimable()).order_by(Job.created_at).limit(MOST_WORKERS)
    for job_id in session.scalars(waiting, {"now": now}).all():
        files = select(JobFile).where(JobFile.job_id == job_id, _claimable()).order_by(JobFile.id).limit(1)
        files = files.with_for_update(of=JobFile, skip_locked=True)
        if (row := session.scalars(files, {"now": now}).first()) is not None:
            return row
    return None


def start_job(session: Session, job_id: str, now: float, attempt: int) -> Job | None:
    """Note in a job that work on it has begun."""
    job = lock_job(session, job_id)
    if job is None or job.status not in ACTIVE:
        return job
    if job.status == "queued":
        job.status = "in_progress"
    job.started_at = job.started_at or now
    job.last_heartbeat_at = now
    job.attempt = max(job.attempt, attempt)
    return job


def has_work(session: Session) -> bool:
    """Whether a file could be claimed."""
    running = select(Job.id).where(_runs(), _has_claimable()).limit(1)
    return session.scalars(running, {"now": time.time()}).first() is not None


def owned(session: Session, lease: FileLease) -> JobFile:
    """The leased row, locked, behind its job. Raises LeaseLost if it is no longer this lease's."""
    lock_job(session, lease.job_id)
    row = session.get(JobFile, lease.job_file_id, with_for_update=True, populate_existing=True)
    if row is None or row.status != "leased" or row.lease_owner != lease.token:
        raise LeaseLost("the lease on this file has expired")
    return row


class JobStatus:
    """What jobs' statuses were a moment ago: all files of one that a process holds ask once between them. Threads share it."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, str | None]] = {}  # when, and what

    def __call__(self, job_id: str) -> str | None:
        now = time.monotonic()
        with self._lock:
            seen_at, status = self._seen.get(job_id, (-math.inf, None))
        if now - seen_at >= CANCEL_SECONDS * 0.9:  # so that one file alone asks at each beat
            with self._catalogue.read() as session:
                status = session.scalar(select(Job.status).where(Job.id == job_id))
            with self._lock:
                self._seen = {job: seen for job, seen in self._seen.items() if now - seen[0] < CANCEL_SECONDS}
                self._seen[job_id] = now, status
        return status


class Hold:
    """A lease while it is worked under: a thread renews it, and `check()` stops the work that must not go
    on."""

    def __init__(
        self,
        catalogue: Catalogue,
        lease: FileLease,
        seconds: float,
        job_status: JobStatus,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """`job_status`: what the process's other holds ask, too; `stopping`: whether it has been told to end."""
        self._catalogue = catalogue
        self._job_status = job_status
        self._stopping = stopping
        self._lease = lease
        self._seconds = seconds
        self._renewed = time.monotonic()
        self._stop: Cancelled | None = None
        self._heartbeat = Heartbeat(self._beat, min(CANCEL_SECONDS, seconds / 3))

    def __enter__(self) -> Hold:
        self._heartbeat.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._heartbeat.__exit__(kind, error, tb)

    @property
    def cancelled(self) -> bool:
        """Whether nobody else will have the file."""
        return self._stop is not None and not isinstance(self._stop, LeaseLost)

    def check(self) -> None:
        """Raise Cancelled if the job was cancelled, LeaseLost if the lease is gone, Stopping if the process is to end."""
        if self._stop is not None:
            raise self._stop
        if self._stopping():
            raise Stopping

    def _beat(self) -> None:
        if self._stop is not None:
            if self.cancelled:
                self._cancel()
            return
        if self._job_status(self._lease.job_id) not in ("queued", "in_progress"):
            self._stop = Cancelled("the job was cancelled")
        elif time.monotonic() - self._renewed >= self._seconds / 3 and not self._renew():
            self._stop = LeaseLost("the lease on this file has expired")

    def _cancel(self) -> None:
        """The work has not noticed since the last beat: end the file here, whatever it is at. It finds its lease gone if it wants
        to store anything."""
        with contextlib.suppress(LeaseLost), self._catalogue.write() as session:
            row = owned(session, self._lease)
            mark_cancelled(session, row, str(self._stop))
            settle(session, row.job_id)

    def _renew(self) -> bool:
        now = time.time()
        with self._catalogue.write() as session:
            session.execute(
                update(Job)
                .where(Job.id == self._lease.job_id, Job.status.in_(ACTIVE))
                .values(last_heartbeat_at=now)
            )
            held: Any = session.execute(
                update(JobFile)
                .where(JobFile.id == self._lease.job_file_id, JobFile.lease_owner == self._lease.token)
                .values(lease_expires=now + self._seconds)
            )
        self._renewed = time.monotonic()
        return bool(held.rowcount)


# --- ends ---


def finish(session: Session, row: JobFile, status: str) -> None:
    """End a file as done or unchanged."""
    row.status = status
    row.lease_owner = row.lease_expires = None


def fail(session: Session, row: JobFile, code: str, message: str) -> None:
    """End a file as failed. Its document says so too, and keeps whatever older content it has."""
    row.status, row.error_code, row.error_message = "failed", code, message or code
    row.lease_owner = row.lease_expires = None
    document = session.get(Document, row.document_id) if row.document_id else None
    if document is not None and row.action in WITH_CONTENT:
        document.status, document.error_code, document.error_message = "failed", code, message or code


def give_back(
    session: Session, row: JobFile, max_attempts: int, code: str, message: str, delay: float = 0.0
) -> None:
    """Let another run try the file; after `max_attempts` of them it has failed with `code`."""
    row.attempt += 1
    if row.attempt >= max_attempts:
        fail(session, row, code, message)
        return
    row.status, row.lease_owner = "pending", None
    row.lease_expires = time.time() + delay if delay else None


def hand_over(session: Session, row: JobFile) -> None:
    """Let another worker have the file at once: this one is to end, which is nobody's failure."""
    row.status = "pending"
    row.lease_owner = row.lease_expires = None


def reap_files(session: Session, now: float) -> set[str]:
    """Return the files that dead workers held, or fail them after too many. The ids of the jobs concerned, to be settled."""
    expired = JobFile.status == "leased", JobFile.lease_expires < now
    jobs = set(session.scalars(select(JobFile.job_id).where(*expired).distinct()))
    for job_id in sorted(jobs):
        job = lock_job(session, job_id)
        rows = select(JobFile).where(JobFile.job_id == job_id, *expired).with_for_update(skip_locked=True)
        for row in session.scalars(rows).all():
            if job is None or job.status == "cancelling":
                mark_cancelled(session, row)
            else:
                lost = f"{row.attempt + 1} workers died on this file"
                give_back(session, row, job.max_attempts, "worker_lost", lost)
    return jobs
