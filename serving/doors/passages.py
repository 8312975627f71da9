"""A passage of a document with the text around it, read in one query with the rights to it.

What a document's chunks leave out is blank (see `ingest.chunker`): between them line ends and spaces are given, as many
characters as there were, so that offsets hold. A span within one chunk, as every citation is, comes back as it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import Session

from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors import corpora, files
from storage.catalogue.schema import ChunkRow, Document, DocumentVersion, JobFile, VersionChunk
from storage.errors import NotFound, UserError


class Span(NamedTuple):
    """Characters [start, end) of a document's text, and how many more are wanted on either side."""

    start: int
    end: int
    context: int = 0


class Source(NamedTuple):
    """Where a text lies: its documents, their chunks, what joins the two, and who may read it."""

    document: Any
    chunk: Any
    joined: ColumnElement[bool]
    rights: Sequence[ColumnElement[bool]]


def show(parts: ApiParts, who: Principal, corpus_id: str, file_id: str, span: Span) -> dict[str, Any]:
    """The passage as it is, or as a kept generation had it. Raises NotFound (`document_replaced` if the document has
    another content now), UserError for a span that it does not have."""
    current = Source(Document, ChunkRow, ChunkRow.document_id == Document.id, files.open_to(who))
    kept_open = [files.kept_open_to(who)]
    kept = Source(DocumentVersion, VersionChunk, VersionChunk.version_id == DocumentVersion.id, kept_open)
    with parts.catalogue.read() as session:
        corpora.find(session, who, corpus_id)
        for source in (current, kept):
            rows = _rows(session, source, corpus_id, file_id, span)
            if rows:
                return _shape(rows, span)
        raise _why_not(session, who, corpus_id, file_id)


def _rows(session: Session, source: Source, corpus_id: str, file_id: str, span: Span) -> Sequence[Any]:
    """(document, chunk, length of the document's text) of the chunks around the span, in order; of one document."""
    document, chunk = source.document, source.chunk
    here = (document.corpus_id == corpus_id, document.file_id == file_id, *source.rights)
    first = select(document.id).where(*here).join(chunk, source.joined).order_by(document.id).limit(1).scalar_subquery()
    own: Select[Any] = select(func.max(chunk.end)).where(source.joined).correlate(document)
    near = (chunk.end > span.start - span.context, chunk.start < span.end + span.context)
    query = select(document, chunk, own.scalar_subquery()).join(chunk, source.joined).where(document.id == first, *here)
    rows = session.execute(query.where(*near).order_by(chunk.start)).all()
    if rows:
        return rows
    length = session.scalar(select(func.max(chunk.end)).join(document, source.joined).where(document.id == first, *here))
    if length is not None:
        raise _outside(span, length)
    return []


def _outside(span: Span, length: int) -> UserError:
    return UserError(f"there is no passage at {span.start}-{span.end}: the text has {length} characters", code="invalid_span")


def _why_not(session: Session, who: Principal, corpus_id: str, file_id: str) -> NotFound:
    """What became of the file, as far as the asker may know."""
    query = select(Document).join(JobFile, JobFile.document_id == Document.id)
    here = (Document.corpus_id == corpus_id, *files.open_to(who), JobFile.file_id == file_id)
    document = session.scalars(query.where(*here).limit(1)).first()
    if document is None:
        return NotFound(f"No file {file_id!r} in vector store {corpus_id!r}: it was deleted, or never was there.")
    if document.file_id == file_id:
        return NotFound(f"{document.path!r} has not been read.", code="document_not_read")
    now = f"its content is that of file {document.file_id!r} now"
    return NotFound(f"{document.path!r} is not what was cited any more: {now}.", code="document_replaced")


def _shape(rows: Sequence[Any], span: Span) -> dict[str, Any]:
    document, length = rows[0][0], rows[0][2]
    chunks = [row[1] for row in rows]
    if span.end > length:
        raise _outside(span, length)
    low, high = max(0, span.start - span.context), min(length, span.end + span.context)
    text = _stitched(chunks, low, high)
    inside = [c for c in chunks if c.end > span.start and c.start < span.end] or chunks[:1]
    quote = text[span.start - low : span.end - low]
    line = _line_at(chunks, span.start)
    kept = isinstance(document, DocumentVersion)
    return {
        "object": "passage",
        "vector_store_id": document.corpus_id,
        "file_id": document.file_id,
        "document_id": document.document_id if kept else document.id,
        "filename": document.path,
        "version": document.sha256,
        "current": not kept,
        "valid_from": document.valid_from if kept else document.current_since,
        "valid_to": document.valid_to if kept else None,
        "start": span.start,
        "end": span.end,
        "before": text[: span.start - low],
        "quote": quote,
        "after": text[span.end - low :],
        "characters": length,
        "headings": list(inside[0].headings),
        "page_start": inside[0].page_start,
        "page_end": inside[-1].page_end,
        "line_start": line,
        "line_end": line + quote.rstrip("\n").count("\n"),
    }


def _stitched(chunks: Sequence[Any], low: int, high: int) -> str:
    """Characters [low, high) of the text that these chunks, in order, are of."""
    pieces, at, line = [], low, None
    for chunk in chunks:
        if chunk.start > at:
            ends = chunk.line_start - (1 if line is None else line)
            pieces.append(_blank(chunk.start - at, ends))
            at = chunk.start
        pieces.append(chunk.text[at - chunk.start : high - chunk.start])
        at, line = max(at, chunk.end), chunk.line_end
    return "".join(pieces)[: high - low].ljust(high - low)


def _blank(characters: int, line_ends: int) -> str:
    ends = min(characters, max(0, line_ends))
    return "\n" * ends + " " * (characters - ends)


def _line_at(chunks: Sequence[Any], offset: int) -> int:
    """The line of a character, counted from the start of the chunk that it is in or behind."""
    before = [chunk for chunk in chunks if chunk.start <= offset]
    if not before:
        return int(chunks[0].line_start)
    last = before[-1]
    line: int = last.line_start + last.text.count("\n", 0, offset - last.start)
    return line
