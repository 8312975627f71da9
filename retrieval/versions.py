"""A search as of a time: what was current then, in the documents as they are and in kept generations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, select
from sqlalchemy.orm import Session

from storage.catalogue.schema import Document, DocumentVersion, VersionChunk
from storage.catalogue.versions import kept_then


@dataclass(frozen=True)
class Kept:
    """A kept generation as the document that it was. Who may see it is who may see the document, where that still is."""

    version_id: str
    id: str
    tenant_id: str
    corpus_id: str
    file_id: str
    path: str
    sha256: str
    access: list[Any] | None
    attributes: dict[str, Any]
    codec: str | None
    not_stored: str | None


_LIVE = (Document.id.label("live"), Document.access.label("live_access"))


def kept_documents(session: Session, corpora: Sequence[str], as_of: float) -> list[Kept]:
    """The kept generations of these corpora that were current then."""
    query = _with_documents(select(DocumentVersion, *_LIVE)).where(DocumentVersion.corpus_id.in_(corpora), kept_then(as_of))
    return [_kept(row) for row in session.execute(query)]


def kept_chunks(session: Session, numbers: Sequence[int], as_of: float) -> dict[int, tuple[VersionChunk, Kept]]:
    """Of the chunks with these numbers in the indexes, those of generations that were current then."""
    query = select(DocumentVersion, *_LIVE, VersionChunk)
    query = _with_documents(query.join(VersionChunk, VersionChunk.version_id == DocumentVersion.id))
    ids = [-number for number in numbers if number < 0]
    rows = session.execute(query.where(VersionChunk.id.in_(ids), kept_then(as_of)))
    return {row.VersionChunk.number: (row.VersionChunk, _kept(row)) for row in rows}


def _with_documents(query: Select[Any]) -> Select[Any]:
    return query.outerjoin(Document, Document.id == DocumentVersion.document_id)


def _kept(row: Row[Any]) -> Kept:
    version: DocumentVersion = row.DocumentVersion
    return Kept(
        version_id=version.id,
        id=version.document_id,
        tenant_id=version.tenant_id,
        corpus_id=version.corpus_id,
        file_id=version.file_id,
        path=version.path,
        sha256=version.sha256,
        access=version.access if row.live is None else row.live_access,
        attributes=version.attributes,
        codec=version.codec,
        not_stored=version.not_stored,
    )
