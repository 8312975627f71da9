"""A search as of a time: what was current then, in the documents as they are and in kept generations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Row, case, select
from sqlalchemy.orm import Session

from retrieval.rules import Rules
from storage.catalogue.schema import ChunkRow, Document, DocumentVersion, VersionChunk
from storage.catalogue.versions import current_then, kept_then

# Who may see a kept generation is who may see the document, where that still is.
_ACCESS = case((Document.id.is_(None), DocumentVersion.access), else_=Document.access).label("access")
_PLACED = (DocumentVersion.tenant_id, DocumentVersion.corpus_id, _ACCESS, DocumentVersion.attributes)
_AS_CHUNK = (
    VersionChunk.ordinal, VersionChunk.text, VersionChunk.token_ids, VersionChunk.start, VersionChunk.end,
    VersionChunk.headings, VersionChunk.page_start, VersionChunk.page_end, VersionChunk.line_start, VersionChunk.line_end,
    VersionChunk.header, VersionChunk.kv_key, DocumentVersion.document_id, DocumentVersion.file_id, DocumentVersion.path,
    DocumentVersion.sha256, DocumentVersion.codec, DocumentVersion.not_stored,
)  # fmt: skip


@dataclass(frozen=True)
class PastRules(Rules):
    """Rules that also ask what was current at `as_of`, seconds since the epoch. What passes is listed."""

    as_of: float = 0.0

    def needed(self, session: Session) -> bool:
        return True

    def among(self, session: Session, chunk_ids: Sequence[int]) -> NDArray[np.int64]:
        return np.intersect1d(self.all(session), np.asarray(chunk_ids, dtype=np.int64))

    def passing(self, session: Session) -> tuple[str, dict[str, Any]]:
        return "SELECT unnest(CAST(:passing AS bigint[]))", {"passing": self.all(session).tolist()}

    def _all(self, session: Session) -> NDArray[np.int64]:
        rules = (Document.tenant_id, Document.corpus_id, Document.access, Document.attributes)
        live = select(ChunkRow.id, *rules).join(Document, Document.id == ChunkRow.document_id)
        live = live.where(Document.corpus_id.in_(self.corpora), current_then(self.as_of))
        kept = _kept(self.as_of, *_PLACED).where(DocumentVersion.corpus_id.in_(self.corpora))
        rows = (row for query in (live, kept) for row in session.execute(query))
        return np.array([row.id for row in rows if self.permits(row)], dtype=np.int64)


def kept_rows(session: Session, numbers: Sequence[int], as_of: float) -> list[Row[Any]]:
    """Of the chunks with these numbers in the indexes, those of generations that were current then: rows with the names of
    a chunk and its document."""
    ids = [-number for number in numbers if number < 0]
    return list(session.execute(_kept(as_of, *_PLACED, *_AS_CHUNK).where(VersionChunk.id.in_(ids))))


def _kept(as_of: float, *columns: Any) -> Any:
    query = select((-VersionChunk.id).label("id"), *columns)
    query = query.join(DocumentVersion, DocumentVersion.id == VersionChunk.version_id)
    return query.outerjoin(Document, Document.id == DocumentVersion.document_id).where(kept_then(as_of))
