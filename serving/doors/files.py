"""Uploaded files. A key sees the files of the documents that it may see, and files that are in no corpus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from sqlalchemy import ColumnElement, Select, and_, or_, select
from sqlalchemy.orm import Session

from ingest.files import PART, delete_file, open_file, store_file
from ingest.jobs import new_id
from ingest.sync import offer
from serving.api.parts import ApiParts
from serving.auth import Principal, audit
from serving.doors.paging import Page, listing, window
from storage.access import is_open_to
from storage.catalogue.schema import Document, DocumentVersion, File
from storage.errors import NotFound, UserError

Rule = Callable[[Principal, Any], list[ColumnElement[bool]]]  # of a table of documents, or of kept generations


def find(session: Session, who: Principal, file_id: str) -> File:
    """A file by id. Raises NotFound."""
    return _found(session, who, file_id, open_to)


def _found(session: Session, who: Principal, file_id: str, rule: Rule) -> File:
    query = select(File).where(File.id == file_id, *_visible(who, rule))
    file = session.scalars(query).first()
    if file is None:
        raise NotFound(f"No such File object: {file_id!r}")
    return file


def _visible(who: Principal, rule: Rule) -> list[ColumnElement[bool]]:
    placed = select(Document.id).where(Document.file_id == File.id)
    seen = placed.where(*rule(who, Document)).exists()
    kept = select(DocumentVersion.id).where(DocumentVersion.file_id == File.id)
    known = seen | kept.where(kept_open_to(who, rule)).exists()
    whole = ~File.purpose.startswith(PART)
    return [File.tenant_id == who.tenant_id, whole, known | ~(placed.exists() | kept.exists())]


def open_to(who: Principal, table: Any = Document) -> list[ColumnElement[bool]]:
    """Which documents a principal may see: in its corpora, with no access list or one that names it."""
    rule = [is_open_to(table.access, who.names)]
    return rule if who.corpora is None else [*rule, table.corpus_id.in_(who.corpora)]


def erasable_by(who: Principal, table: Any = Document) -> list[ColumnElement[bool]]:
    """Which documents a principal may delete: those that it may see, and an admin all of its corpora, seen or not. No list
    keeps a document from being erased."""
    if not who.may("admin"):
        return open_to(who, table)
    return [] if who.corpora is None else [table.corpus_id.in_(who.corpora)]


def kept_open_to(who: Principal, rule: Rule = open_to) -> ColumnElement[bool]:
    """Which kept generations a rule allows: those of documents that it does, or did when they were deleted."""
    live = select(Document.id).where(Document.id == DocumentVersion.document_id)
    return or_(live.where(*rule(who, Document)).exists(), and_(~live.exists(), *rule(who, DocumentVersion)))


def store(parts: ApiParts, who: Principal, filename: str, data: bytes | BinaryIO, purpose: str) -> File:
    """Keep an upload, and give it to the syncs that wait for it. Same bytes and name are the same file while no document
    is made of it, so that a repeated request changes nothing; later they are a file of their own, so that whoever
    deletes an upload of theirs deletes nobody else's document."""
    while True:
        stored = store_file(parts.catalogue, parts.objects, who.tenant_id, filename, data, purpose)
        with parts.catalogue.write() as session:
            if session.get(File, stored.id, with_for_update=True) is None:
                continue  # deleted meanwhile, and maybe its bytes with it
            file = session.scalars(_unused(stored, purpose)).first()
            if file is None:
                file = _twin(stored)
                session.add(file)
                session.flush()
            awaited = offer(session, file)
        if awaited:
            parts.ring("ingest")
        return file


def adopt(session: Session, stored: File, purpose: str) -> File:
    """The file that is to be shown for one that was stored under a hidden purpose, and is held by the caller's transaction:
    one with the same name and bytes that no document is made of, so that uploads that are repeated do not add up, or it."""
    own = session.get_one(File, stored.id)
    file = session.scalars(_unused(own, purpose).with_for_update()).first()
    if file is None:
        own.purpose = purpose
        session.flush()
        return own
    session.delete(own)
    return file


def _unused(file: File, purpose: str) -> Select[File]:
    """Files with the same name and bytes that no document is made of. (Who adds a file to a corpus makes its document.)"""
    same = [getattr(File, name) == getattr(file, name) for name in ("tenant_id", "sha256", "filename")]
    placed, kept = (select(t.id).where(t.file_id == File.id).exists() for t in (Document, DocumentVersion))
    return select(File).where(*same, File.purpose == purpose, ~placed, ~kept).order_by(File.created_at, File.id)


def _twin(file: File) -> File:
    return File(
        id=new_id("file"),
        tenant_id=file.tenant_id,
        filename=file.filename,
        bytes=file.bytes,
        sha256=file.sha256,
        purpose=file.purpose,
        created_at=time.time(),
    )


def upload(parts: ApiParts, who: Principal, filename: str, data: BinaryIO, purpose: str) -> dict[str, Any]:
    """Keep an upload and show it."""
    return shape(store(parts, who, filename, data, purpose))


def show_all(parts: ApiParts, who: Principal, page: Page, purpose: str | None) -> dict[str, Any]:
    """A page of files."""
    with parts.catalogue.read() as session:
        cursor = find(session, who, page.after) if page.after else None
        query = select(File).where(*_visible(who, open_to))
        query = query if purpose is None else query.where(File.purpose == purpose)
        rows, more = window(session, query, File, page, cursor)
        return listing([shape(row) for row in rows], more)


def show(parts: ApiParts, who: Principal, file_id: str) -> dict[str, Any]:
    """One file. Raises NotFound."""
    with parts.catalogue.read() as session:
        return shape(find(session, who, file_id))


@contextmanager
def content(parts: ApiParts, who: Principal, file_id: str) -> Iterator[tuple[File, BinaryIO]]:
    """A file, and a stream of its bytes as uploaded. Raises NotFound, ObjectMissing, StorageUnavailable."""
    with parts.catalogue.read() as session:
        file = find(session, who, file_id)
    with open_file(parts.objects, file) as stream:
        yield file, stream


def remove(parts: ApiParts, who: Principal, file_id: str) -> None:
    """Delete a file and the documents made of it. Raises NotFound, or UserError if others still hold it."""
    with parts.catalogue.read() as session:
        _found(session, who, file_id, erasable_by)
        query = select(Document.id).where(Document.file_id == file_id, *erasable_by(who))
        documents = session.scalars(query).all()
    for document_id in documents:
        parts.deleter.document(who.tenant_id, document_id, raw=False)
    parts.deleter.kept(who.tenant_id, and_(DocumentVersion.file_id == file_id, kept_open_to(who, erasable_by)))
    if not delete_file(parts.catalogue, parts.objects, who.tenant_id, file_id):
        raise UserError(
            "This file is still being read into a vector store, or another key's documents need it.",
            code="file_in_use",
        )
    with parts.catalogue.write() as session:
        audit(session, who, "file.delete", file_id, parts.clock())


def shape(file: File) -> dict[str, Any]:
    """A file as the API shows it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "sha256": file.sha256,
    }
