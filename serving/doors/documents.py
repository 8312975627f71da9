"""Documents, shown as the files of a vector store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Select, and_, select
from sqlalchemy.orm import Session

from ingest import jobs
from ingest.attach import attach
from ingest.job_view import RETRYABLE
from ingest.jobs import JobItem, create_job
from serving.api.parts import ApiParts
from serving.auth import Principal, audit
from serving.doors import corpora, files, purges
from serving.doors.paging import Page, listing, window
from storage.access import is_open
from storage.catalogue.schema import ChunkRow, Corpus, Document, DocumentVersion, Job, JobFile
from storage.errors import NotFound

OPEN = ("pending", "leased")
_CHUNKING = {"type": "other"}


@dataclass(frozen=True)
class Wanted:
    """A file that is to become a document. No path: its file name."""

    file_id: str
    attributes: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    access: list[Any] | None = (
        None  # ids of the keys that may see it beside its adder; None: all of the tenant
    )


def plan(session: Session, who: Principal, corpus: Corpus, wanted: Sequence[Wanted]) -> Job:
    """A job that makes documents of files, in the caller's transaction. Raises NotFound, PathClosed."""
    items: dict[str, JobItem] = {}
    for want in {want.file_id: want for want in wanted}.values():
        file = files.find(session, who, want.file_id)
        path = want.path or file.filename
        path = (
            f"{file.id}/{path}" if path in items else path
        )  # two files of one name in one batch are both kept
        document = attach(
            session, corpus, path, file.id, file.sha256,
            attributes=want.attributes, access=_access(who, want), names=who.names,
        )  # fmt: skip
        items[path] = JobItem(path, document.id, file.id)
    return create_job(
        session, tenant_id=who.tenant_id, corpus_id=corpus.id, type="ingest", items=list(items.values()),
        request=jobs.asked_by(who.names),
    )  # fmt: skip


def _access(who: Principal, want: Wanted) -> list[Any] | None:
    """Whoever adds a document goes on seeing it: the person or the key alone, not the groups they are in."""
    return None if want.access is None else sorted({*want.access, *who.own_names})


def add(parts: ApiParts, who: Principal, corpus_id: str, wanted: Wanted) -> dict[str, Any]:
    """Put a file into a vector store. Raises NotFound."""
    with parts.catalogue.write() as session:
        corpus = corpora.find(session, who, corpus_id)
        job = plan(session, who, corpus, [wanted])
        shown = {**_show(session, who, corpus.id, wanted.file_id), "job_id": job.id}
    parts.ring("ingest")
    return shown


def show(parts: ApiParts, who: Principal, corpus_id: str, file_id: str) -> dict[str, Any]:
    """One file of a vector store. Raises NotFound."""
    with parts.catalogue.read() as session:
        return _show(session, who, corpora.find(session, who, corpus_id).id, file_id)


def show_all(
    parts: ApiParts, who: Principal, corpus_id: str, page: Page, status: str | None
) -> dict[str, Any]:
    """A page of a vector store's files. An admin's has those that are not open to it too, without their names and attributes,
    so that they can be deleted."""
    with parts.catalogue.read() as session:
        corpus = corpora.find(session, who, corpus_id)
        cursor = _cursor(session, who, corpus.id, page.after) if page.after else None
        query = select(Document).where(Document.corpus_id == corpus.id, *files.erasable_by(who))
        query = query if status is None else query.where(Document.status == status)
        rows, more = window(session, query, Document, page, cursor)
        return listing([_listed(row, who) for row in rows], more)


def _cursor(session: Session, who: Principal, corpus_id: str, file_id: str) -> Document:
    held = session.scalars(_held(who, corpus_id, file_id, files.erasable_by)).first()
    return held or find(session, who, corpus_id, file_id)


def _listed(document: Document, who: Principal) -> dict[str, Any]:
    shown = document_shape(document)
    if is_open(document.access, who.names):
        return shown
    return {**shown, "path": None, "attributes": {}, "last_error": last_error(document.error_code, None)}


def change(
    parts: ApiParts, who: Principal, corpus_id: str, file_id: str, attributes: dict[str, Any]
) -> dict[str, Any]:
    """Replace a file's attributes; searches see it at once. Raises NotFound."""
    with parts.catalogue.write() as session:
        document = held(session, who, corpora.find(session, who, corpus_id).id, file_id)
        document.attributes = attributes
        return document_shape(document)


def text(parts: ApiParts, who: Principal, corpus_id: str, file_id: str) -> dict[str, Any]:
    """The text that was read from a file, in the pieces in which it is searched. Raises NotFound."""
    query = select(ChunkRow.text).order_by(ChunkRow.ordinal)
    with parts.catalogue.read() as session:
        document = find(session, who, corpora.find(session, who, corpus_id).id, file_id)
        pieces = session.scalars(query.where(ChunkRow.document_id == document.id)).all()
    data = [{"type": "text", "text": piece} for piece in pieces]
    return {"object": "vector_store.file_content.page", "data": data, "has_more": False, "next_page": None}


def remove(parts: ApiParts, who: Principal, corpus_id: str, file_id: str) -> dict[str, Any]:
    """Take a document out of a vector store, down to its stored KV and its kept generations; its file stays. A file that
    only a kept generation holds goes with that one. With the receipt."""
    theirs = files.kept_open_to(who, files.erasable_by)
    of_file = (DocumentVersion.corpus_id == corpus_id, DocumentVersion.file_id == file_id, theirs)
    with parts.catalogue.write() as session:
        corpora.find(session, who, corpus_id)
        document = session.scalars(_held(who, corpus_id, file_id, files.erasable_by)).first()
        if document is None and session.scalars(select(DocumentVersion.id).where(*of_file).limit(1)).first() is None:
            raise _no_document(corpus_id, file_id)
        audit(session, who, "document.delete", document.id if document else file_id, parts.clock())
    if document is not None:
        receipt = parts.deleter.document(who.tenant_id, document.id, raw=False)
    else:
        receipt = parts.deleter.kept(who.tenant_id, and_(*of_file))
    purged = purges.record(parts, who, corpus_id, receipt, {"file_id": file_id})
    deleted = {"id": file_id, "object": "vector_store.file.deleted", "deleted": True}
    return {**deleted, **purged}


def held(session: Session, who: Principal, corpus_id: str, file_id: str) -> Document:
    """The document whose content a file is, or is to be first. Raises NotFound."""
    document = session.scalars(_held(who, corpus_id, file_id)).first()
    if document is None:
        raise _no_document(corpus_id, file_id)
    return document


def find(session: Session, who: Principal, corpus_id: str, file_id: str) -> Document:
    """The document that holds a file, or for which it was last read as the next content. Raises NotFound."""
    document = session.scalars(_held(who, corpus_id, file_id)).first()
    document = document or session.scalars(_last_try(who, corpus_id, file_id)).first()
    if document is None:
        raise _no_document(corpus_id, file_id)
    return document


def _no_document(corpus_id: str, file_id: str) -> NotFound:
    return NotFound(f"No file {file_id!r} in vector store {corpus_id!r}")


def _held(who: Principal, corpus_id: str, file_id: str, rule: files.Rule = files.open_to) -> Select[Document]:
    query = select(Document).where(
        Document.corpus_id == corpus_id, Document.file_id == file_id, *rule(who, Document)
    )
    return query.order_by(Document.created_at, Document.id).limit(1)


def _last_try(who: Principal, corpus_id: str, file_id: str) -> Select[Document]:
    query = select(Document).join(JobFile, JobFile.document_id == Document.id)
    tried = JobFile.status.in_((*OPEN, "failed", "cancelled"))
    own = (Document.corpus_id == corpus_id, *files.open_to(who))
    return query.where(*own, JobFile.file_id == file_id, tried).limit(1)


def _show(session: Session, who: Principal, corpus_id: str, file_id: str) -> dict[str, Any]:
    document = find(session, who, corpus_id, file_id)
    if document.file_id == file_id:
        return document_shape(document)
    query = select(JobFile).where(JobFile.document_id == document.id, JobFile.file_id == file_id)
    row = session.scalars(query.order_by(JobFile.id.desc()).limit(1)).one()
    return job_file_shape(row, document)


def document_shape(document: Document) -> dict[str, Any]:
    """A document as a vector store's file."""
    return {
        "id": document.file_id,
        "object": "vector_store.file",
        "created_at": int(document.created_at),
        "vector_store_id": document.corpus_id,
        "status": document.status,
        "last_error": last_error(document.error_code, document.error_message),
        "usage_bytes": document.usage_bytes,
        "attributes": document.attributes,
        "chunking_strategy": _CHUNKING,
        "document_id": document.id,
        "path": document.path,
    }


def job_file_shape(row: JobFile, document: Document) -> dict[str, Any]:
    """A file that is on its way into a document, or did not make it."""
    error = last_error(row.error_code, row.error_message) if row.status in ("failed", "cancelled") else None
    return {
        **document_shape(document),
        "id": row.file_id,
        "status": shown_status(row.status),
        "last_error": error,
    }


_SHOWN_AS = {
    "done": "completed",
    "unchanged": "completed",
    "pending": "in_progress",
    "leased": "in_progress",
}


def shown_status(status: str) -> str:
    """A job file's status in the vector store's words."""
    return _SHOWN_AS.get(status, status)


def statuses_shown_as(shown: str) -> list[str]:
    """A job file's statuses that are one in the vector store's words."""
    return [status for status, as_ in _SHOWN_AS.items() if as_ == shown] or [shown]


def last_error(code: str | None, message: str | None) -> dict[str, Any] | None:
    """OpenAI knows three codes; ours stands beside as `detail_code`."""
    if code is None:
        return None
    if code == "unsupported_file":
        general = code
    else:
        general = "server_error" if code in RETRYABLE else "invalid_file"
    return {"code": general, "message": message or code, "detail_code": code}
