"""The end of a job: derived from its rows, and written down once."""

from __future__ import annotations

import time

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest.job_view import errors_of, live_progress, warnings_of
from storage.catalogue.schema import ChunkRow, Job, JobFile, KVObject

OWED = ("pending", "leased")


def owes_kv(session: Session, job_id: str) -> bool:
    """Whether a chunk of the job's documents still waits for its KV object, whichever job asked for that first."""
    owed = (
        select(KVObject.key)
        .join(ChunkRow, ChunkRow.kv_key == KVObject.key)
        .join(JobFile, JobFile.document_id == ChunkRow.document_id)
        .where(JobFile.job_id == job_id, KVObject.status.in_(OWED))
        .limit(1)
    )
    own = owed.where(KVObject.job_id == job_id)  # found by an index, and while the job computes there is one
    return any(session.scalars(query).first() is not None for query in (own, owed))


def end_job(session: Session, job: Job, *, cancelled: bool) -> None:
    """The one place where a job becomes terminal: its row is locked, and the caller's transaction commits it. What it
    shows is kept, so that it never changes again."""
    counts = _file_counts(session, job.id)
    errors = errors_of(session, job)
    lost = counts.get("failed", 0) + counts.get("cancelled", 0)
    if cancelled:
        job.status = "cancelled"
    elif "error" in job.result or (lost and lost == sum(counts.values())):
        job.status = "failed"
    else:
        job.status = "completed_with_errors" if errors else "completed"
    job.finished_at = time.time()
    job.stage = "commit" if job.status.startswith("completed") else job.stage
    progress = {**live_progress(session, job), "eta_seconds": 0.0}
    final = {"progress": progress, "errors": errors, "warnings": warnings_of(session, job)}
    job.result = {**job.result, "final": final}


def _file_counts(session: Session, job_id: str) -> dict[str, int]:
    counted = select(JobFile.status, func.count()).where(JobFile.job_id == job_id).group_by(JobFile.status)
    return {row[0]: row[1] for row in session.execute(counted)}
