"""What a job shows of itself: counted from its rows while it runs, frozen when it ends."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import ColumnElement, case, func, or_, select
from sqlalchemy.orm import Session

from ingest.rights import shown_to
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow, Job, JobFile, KVObject

# Where trying again, without changing the file, can help.
MOST_ERRORS = 1000  # that a job names; `files_failed` counts all
RETRYABLE = frozenset("parser_timeout embedding_failed kv_failed storage_error cancelled worker_lost".split())
_NO_KV = ("failed", "over_quota")
_STATUS_RANK = ("queued", "in_progress", "cancelling")
_STAGES = ("fetch", "extract", "chunk", "embed", "kv", "commit")


def view(session: Session, job: Job, names: Collection[str] | None = None) -> dict[str, Any]:
    """The job object of the API, as who is known by `names` may see it; None: all of it. What it says of a job that has
    ended never changes, but for who may see a document."""
    final = job.result.get("final")
    if final is not None:
        progress, errors, warnings = final["progress"], final["errors"], final.get("warnings", [])
    else:
        progress, errors, warnings = live_progress(session, job), errors_of(session, job), warnings_of(session, job)
    if names is not None:
        errors, warnings = (shown_to(session, job.corpus_id, said, names) for said in (errors, warnings))
    return {
        "id": job.id,
        "object": "job",
        "type": job.type,
        "status": job.status,
        "corpus_id": job.corpus_id,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "last_heartbeat_at": job.last_heartbeat_at,
        "finished_at": job.finished_at,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "stage": job.stage,
        "progress": progress,
        "errors": errors,
        "warnings": warnings,
    }


def warnings_of(session: Session, job: Job) -> list[dict[str, Any]]:
    """What files that were read could not give, such as pages without text; MOST_ERRORS at most."""
    said = JobFile.error_code.is_(None), JobFile.error_message.is_not(None)
    rows = session.scalars(select(JobFile).where(JobFile.job_id == job.id, *said).order_by(JobFile.id).limit(MOST_ERRORS))
    return [{"file_id": row.file_id, "filename": row.path, "message": row.error_message} for row in rows]


def errors_of(session: Session, job: Job) -> list[dict[str, Any]]:
    """One error per file that failed or is incomplete, then one per file whose KV could not be made; MOST_ERRORS at
    most."""
    query = select(JobFile).where(JobFile.job_id == job.id, JobFile.error_code.is_not(None))
    rows = session.scalars(query.order_by(JobFile.id).limit(MOST_ERRORS))
    errors = [_error(row, str(row.error_code), row.error_message or "") for row in rows]
    if "error" in job.result:
        errors.insert(0, {"file_id": None, "filename": None, **job.result["error"]})
    if session.scalar(select(KVObject.key).where(KVObject.status.in_(_NO_KV)).limit(1)) is None:
        return errors  # mostly so, and quickly known
    for row, status, count in session.execute(_without_kv(job.id)):
        full = status == "over_quota"
        why = f"{count} chunks have no stored KV{', as the quota is used up' if full else ''}"
        code = "insufficient_quota" if full else "kv_failed"
        errors.append(_error(row, code, f"{why}; they are computed when asked"))
    return errors[:MOST_ERRORS]


def _without_kv(job_id: str) -> Any:
    """Files that are well but for KV that cannot be stored, with how many chunks have none and why."""
    return (
        select(JobFile, KVObject.status, func.count(ChunkRow.id))
        .join(ChunkRow, ChunkRow.document_id == JobFile.document_id)
        .join(KVObject, KVObject.key == ChunkRow.kv_key)
        .where(JobFile.job_id == job_id, JobFile.error_code.is_(None), KVObject.status.in_(_NO_KV))
        .group_by(JobFile.id, KVObject.status)
        .order_by(JobFile.id)
        .limit(MOST_ERRORS)
    )


def failed_files(job_id: str) -> ColumnElement[bool]:
    """Which files of an ended job its errors are about, whether it names them or not."""
    without = _without_kv(job_id).limit(None).order_by(None).with_only_columns(JobFile.id)
    return or_(JobFile.error_code.is_not(None), JobFile.id.in_(without))


def _error(row: JobFile, code: str, message: str) -> dict[str, Any]:
    return {
        "file_id": row.file_id,
        "filename": row.path,
        "code": code,
        "message": message,
        "retryable": code in RETRYABLE,
    }


def live_progress(session: Session, job: Job) -> dict[str, Any]:
    """Counts that only ever grow while the job runs."""
    counted = session.execute(
        select(
            func.count(),
            func.sum(case((JobFile.status == "done", 1), else_=0)),
            func.sum(case((JobFile.status == "failed", 1), else_=0)),
            func.sum(case((JobFile.status == "unchanged", 1), else_=0)),
            func.sum(case((JobFile.status == "cancelled", 1), else_=0)),
            func.sum(JobFile.chunks_total),
            func.sum(JobFile.chunks_reused),
        ).where(JobFile.job_id == job.id)
    ).one()
    total, done, failed, unchanged, cancelled, chunks, reused = (int(value or 0) for value in counted)
    kv = job.result.get("kv", {})
    progress = {
        "files_total": total,
        "files_done": done,
        "files_failed": failed,
        "files_unchanged": unchanged,
        "chunks_total": chunks,
        "chunks_reused": reused,
        "chunks_computed": kv.get("chunks", 0),
        "kv_bytes_written": kv.get("bytes", 0),
        "kv_bytes_reused": job.result.get("reused_bytes", 0),
    }
    ended = done + failed + unchanged + cancelled
    return {**progress, "eta_seconds": _eta(session, job, ended, total, kv.get("tokens", 0))}


def _eta(session: Session, job: Job, ended: int, total: int, computed: int) -> float | None:
    """Seconds left at the pace so far; None before there is a pace."""
    if job.started_at is None or not ended:
        return None
    owed = session.scalar(
        select(func.sum(KVObject.tokens)).where(
            KVObject.job_id == job.id, KVObject.status.in_(("pending", "leased"))
        )
    )
    kv_share = computed / (computed + owed) if owed else 1.0
    share = (ended / total + kv_share) / 2
    return round((time.time() - job.started_at) * (1 - share) / share, 1)


def progress_id(shown: dict[str, Any]) -> int:
    """A number that grows when the shown job gets further (heartbeats and bytes apart): the id of its
    event."""
    progress, status = shown["progress"], shown["status"]
    rank = _STATUS_RANK.index(status) if status in _STATUS_RANK else len(_STATUS_RANK)
    counts = sum(value for name, value in progress.items() if not name.startswith(("eta", "kv_bytes")))
    return int(counts) + rank + _STAGES.index(shown["stage"]) + 1


def job_events(
    catalogue: Catalogue, asked: Iterable[tuple[str, frozenset[str]]]
) -> dict[tuple[str, frozenset[str]], tuple[int, dict[str, Any]]]:
    """Jobs as they are now, each as who is known by some names may see it, in one snapshot, with the event's id; a job that is
    unknown is left out."""
    found = {}
    with catalogue.read() as session:
        for job_id, names in asked:
            job = session.get(Job, job_id)
            if job is not None:
                shown = view(session, job, names)
                found[job_id, names] = progress_id(shown), shown
    return found
