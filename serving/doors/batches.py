"""Many documents with one job. A file batch is a job, under the job's id."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ingest import jobs
from ingest.archive import Skipped, is_archive
from ingest.archive_isolated import expand_isolated
from ingest.attaching import BATCH, attach_for_request, check_open, items_of
from ingest.files import PART, drop_source_files, store_file
from ingest.job_view import view
from ingest.jobs import create_job
from ingest.plans import lease_plan
from ingest.sync import offer
from serving.api.parts import ApiParts
from serving.auth import Principal, audit
from serving.doors import corpora, documents, files
from serving.doors.documents import Wanted
from serving.doors.paging import Page, listing
from storage.catalogue.schema import Document, File, Job, JobFile
from storage.errors import NotFound, UserError

LONGEST_PATH = 4096


def create_store(
    parts: ApiParts, who: Principal, name: str, metadata: dict[str, Any], wanted: Sequence[Wanted],
    description: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A new vector store with files in it. Raises NotFound, Forbidden."""
    with parts.catalogue.write() as session:
        corpus = corpora.add(session, parts, who, name, metadata, description)
        if wanted:
            documents.plan(session, who, corpus, wanted)
        shown = corpora.shapes(session, [corpus])[0]
    if wanted:
        parts.ring("ingest")
    return shown


def add(parts: ApiParts, who: Principal, corpus_id: str, wanted: Sequence[Wanted]) -> dict[str, Any]:
    """Put files into a vector store with one job. Raises NotFound."""
    with parts.catalogue.write() as session:
        job = documents.plan(session, who, corpora.find(session, who, corpus_id), wanted)
        shown = shape(session, job)
    parts.ring("ingest")
    return shown


def find(session: Session, who: Principal, corpus_id: str, batch_id: str) -> Job:
    """A batch by id. Raises NotFound."""
    corpus = corpora.find(session, who, corpus_id)
    job = session.get(Job, batch_id)
    if job is None or job.corpus_id != corpus.id:
        raise NotFound(f"No file batch {batch_id!r} in vector store {corpus_id!r}")
    return job


def show(parts: ApiParts, who: Principal, corpus_id: str, batch_id: str) -> dict[str, Any]:
    """One batch. Raises NotFound."""
    with parts.catalogue.read() as session:
        return shape(session, find(session, who, corpus_id, batch_id))


def show_files(
    parts: ApiParts, who: Principal, corpus_id: str, batch_id: str, page: Page, status: str | None
) -> dict[str, Any]:
    """A page of a batch's files, in the order in which they were given or the reverse."""
    forwards = page.order == "asc"
    with parts.catalogue.read() as session:
        job = find(session, who, corpus_id, batch_id)
        query = (
            select(JobFile, Document)
            .join(Document, Document.id == JobFile.document_id)
            .where(JobFile.job_id == job.id, JobFile.file_id.is_not(None), *files.open_to(who))
            .order_by(JobFile.id if forwards else JobFile.id.desc())
        )
        if status is not None:
            query = query.where(JobFile.status.in_(documents.statuses_shown_as(status)))
        if page.after:
            last = select(JobFile.id).join(Document, Document.id == JobFile.document_id)
            last = last.where(JobFile.job_id == job.id, JobFile.file_id == page.after, *files.open_to(who))
            if (after := session.scalar(last.limit(1))) is None:
                raise NotFound(f"No file {page.after!r} in file batch {batch_id!r}")
            query = query.where(JobFile.id > after if forwards else JobFile.id < after)
        rows = session.execute(query.limit(page.limit + 1)).all()
    shown = [documents.job_file_shape(row, document) for row, document in rows]
    return listing(shown[: page.limit], len(shown) > page.limit)


def cancel(parts: ApiParts, who: Principal, corpus_id: str, batch_id: str) -> dict[str, Any]:
    """Stop a batch; one that has ended stays as it is. Raises NotFound."""
    with parts.catalogue.write() as session:
        job = find(session, who, corpus_id, batch_id)
        jobs.cancel(session, job.id)
        audit(session, who, "job.cancel", job.id, parts.clock())
        session.flush()
        return shape(session, job)


def shape(session: Session, job: Job) -> dict[str, Any]:
    """A job as a file batch: done when every file is searchable or has failed; its stored KV may follow."""
    counts = dict.fromkeys(corpora.COUNTED, 0)
    grouped = select(JobFile.status, func.count()).where(JobFile.job_id == job.id).group_by(JobFile.status)
    for status, count in session.execute(grouped):
        counts[documents.shown_status(status)] += count
    running = "in_progress" if counts["in_progress"] else "completed"
    return {
        "id": job.id,
        "object": "vector_store.file_batch",
        "created_at": int(job.created_at),
        "vector_store_id": job.corpus_id,
        "status": "cancelled" if job.status in ("cancelled", "cancelling") else running,
        "file_counts": {**counts, "total": sum(counts.values())},
    }


def upload(
    parts: ApiParts, who: Principal, corpus_id: str, given: Sequence[tuple[str, BinaryIO]]
) -> dict[str, Any]:
    """Keep files, unpack archives, and make each file the document at its path, with one job.

    With the job, and what was left out of archives. Raises NotFound, PathClosed, UserError, StorageUnavailable."""
    with parts.catalogue.read() as session:
        corpora.find(session, who, corpus_id)
    kept: list[tuple[str, File]] = []
    skipped: list[dict[str, str]] = []
    purpose = PART + secrets.token_hex(12)  # no file that anybody can see, until there is a document of it
    try:
        for path, found in _unpacked(given):
            if isinstance(found, Skipped):
                skipped.append({"path": path, "reason": found.reason})
            else:
                kept.append((_checked(path), store_file(parts.catalogue, parts.objects, who.tenant_id, path, found, purpose)))
        shown = _attached(parts, who, corpus_id, kept)
    except BaseException:  # refused: nothing of it stays
        drop_source_files(parts.catalogue, parts.objects, who.tenant_id, [file.id for _, file in kept])
        raise
    parts.ring("ingest")
    return {**shown, "skipped": skipped}


def _attached(parts: ApiParts, who: Principal, corpus_id: str, kept: Sequence[tuple[str, File]]) -> dict[str, Any]:
    """The job that makes a document of each stored file, which is a file like any other from here on."""

    def adopt(session: Session, stored: File) -> File:
        file = files.adopt(session, stored, "assistants")
        offer(session, file)
        return file

    planned = len(kept) <= BATCH
    with parts.catalogue.write() as session:
        corpus = corpora.find(session, who, corpus_id)
        check_open(session, corpus, [path for path, _ in kept], who.names)
        job = create_job(
            session, tenant_id=who.tenant_id, corpus_id=corpus.id, type="ingest",
            items=items_of(session, corpus, kept, who.names, adopt) if planned else (),
            request=jobs.asked_by(who.names), planned=planned,
        )  # fmt: skip
        if not planned:
            lease_plan(job)
    if not planned:
        attach_for_request(parts.catalogue, job, kept, who.names, adopt)
    with parts.catalogue.read() as session:
        return view(session, session.get_one(Job, job.id), who.names)


def _unpacked(given: Sequence[tuple[str, BinaryIO]]) -> Iterator[tuple[str, bytes | BinaryIO | Skipped]]:
    """Files by path, those of archives one at a time."""
    for path, stream in given:
        if not is_archive(stream):
            yield path, stream
            continue
        for part in expand_isolated(stream, path):
            yield part.path, part if isinstance(part, Skipped) else part.data


def _checked(path: str) -> str:
    if not path or len(path) > LONGEST_PATH or "\0" in path:
        raise UserError(f"a path has 1 to {LONGEST_PATH} characters and no NUL")
    return path
