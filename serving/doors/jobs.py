"""Jobs, within the asker's rights."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from ingest import jobs
from ingest.job_view import view
from serving.api.parts import ApiParts
from serving.auth import Forbidden, Principal, audit
from serving.doors.paging import Page, listing, window
from storage.access import is_open
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Document, Job, JobFile
from storage.errors import NotFound

ENDED = ("cancelled", "completed", "completed_with_errors", "failed")


def find(session: Session, who: Principal, job_id: str) -> Job:
    """A job by id. Raises NotFound."""
    job = session.get(Job, job_id)
    if job is None or job.tenant_id != who.tenant_id or not who.sees(job.corpus_id):
        raise NotFound(f"No such job: {job_id!r}")
    return job


def _visible(who: Principal) -> Select[Any]:
    query = select(Job).where(Job.tenant_id == who.tenant_id)
    return query if who.corpora is None else query.where(Job.corpus_id.in_(who.corpora))


def show_all(parts: ApiParts, who: Principal, page: Page, corpus_id: str | None, status: str | None) -> dict[str, Any]:
    """A page of jobs, of one corpus or status if asked."""
    query = _visible(who)
    query = query if corpus_id is None else query.where(Job.corpus_id == corpus_id)
    query = query if status is None else query.where(Job.status == status)
    with parts.catalogue.read() as session:
        cursor = find(session, who, page.after) if page.after else None
        rows, more = window(session, query, Job, page, cursor)
        return listing([view(session, row, who.names) for row in rows], more)


def show(parts: ApiParts, who: Principal, job_id: str) -> dict[str, Any]:
    """One job. Raises NotFound."""
    with parts.catalogue.read() as session:
        return view(session, find(session, who, job_id), who.names)


def cancel(parts: ApiParts, who: Principal, job_id: str) -> dict[str, Any]:
    """Tell a job to stop; one that has ended stays as it is."""
    with parts.catalogue.write() as session:
        find(session, who, job_id)
        jobs.cancel(session, job_id)
        audit(session, who, "job.cancel", job_id, parts.clock())
        session.flush()
        return view(session, find(session, who, job_id), who.names)


def retry(parts: ApiParts, who: Principal, job_id: str, only: str) -> dict[str, Any]:
    """A new job over the files of an ended one. Raises NotFound, UserError, or Forbidden if one of its documents is not
    open to the asker: the job may hold an older content, or delete."""
    with parts.catalogue.write() as session:
        find(session, who, job_id)
        if not all(is_open(access, who.names) for access in session.scalars(_access_lists(job_id))):
            raise Forbidden("This job holds documents that you may not write to.", code="path_closed")
        shown = view(session, jobs.retry(session, job_id, only), who.names)
    parts.ring("ingest")
    return shown


def _access_lists(job_id: str) -> Select[Any]:
    return select(Document.access).join(JobFile, JobFile.document_id == Document.id).where(JobFile.job_id == job_id)


def count_by_status(catalogue: Catalogue) -> dict[str, int]:
    """How many jobs of all tenants there are by status."""
    with catalogue.read() as session:
        rows = session.execute(select(Job.status, func.count()).group_by(Job.status)).all()
        return {str(row[0]): int(row[1]) for row in rows}
