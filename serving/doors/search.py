"""Searches in the asker's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from retrieval.neighbours import in_reading_order
from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors import corpora, files
from serving.engine.types import Message
from storage.catalogue.schema import ChunkRow, Document, DocumentVersion, VersionChunk
from storage.types import RetrievedChunk


def chunks(
    parts: ApiParts,
    who: Principal,
    corpus_ids: Sequence[str],
    query: str,
    top_k: int,
    token_budget: int,
    as_of: float | None = None,
    filters: dict[str, Any] | None = None,
    threshold: float | None = None,
    rerank: bool = True,
) -> tuple[RetrievedChunk, ...]:
    """The best chunks for a prompt, best first; what stands together in a document stands together here."""
    found = parts.retriever.search(
        tenant_id=who.tenant_id,
        corpus_ids=corpus_ids,
        query=query,
        top_k=top_k,
        token_budget=token_budget,
        principals=who.names,
        as_of=as_of,
        filters=filters,
        score_threshold=threshold,
        rerank=rerank,
    )
    return tuple(in_reading_order(found))


def known(parts: ApiParts, who: Principal, messages: Sequence[Message], method: str) -> tuple[RetrievedChunk, ...]:
    """Stored chunks that may stand in the messages themselves; none where no stored KV is asked for."""
    if parts.known is None or method == "full":
        return ()
    texts = [message.content for message in messages]
    return parts.known.find(texts, tenant_id=who.tenant_id, corpora=who.corpora, principals=who.names)


def still_there(parts: ApiParts, who: Principal, chunks: Sequence[RetrievedChunk]) -> frozenset[int]:
    """Ids of those chunks that are searchable, and the asker's to see, to this moment."""
    query = (
        select(ChunkRow.id, ChunkRow.document_id, ChunkRow.text)
        .join(Document, Document.id == ChunkRow.document_id)
        .where(ChunkRow.id.in_([chunk.chunk_id for chunk in chunks]))
        .where(Document.tenant_id == who.tenant_id, *files.open_to(who))
    )
    with parts.catalogue.read() as session:
        rows = {row[0]: (row[1], row[2]) for row in session.execute(query)}
        rows |= _kept_there(session, who, [chunk.chunk_id for chunk in chunks])
    # Text and document are compared, since a database may give a deleted chunk's id to another one.
    return frozenset(c.chunk_id for c in chunks if rows.get(c.chunk_id) == (c.document_id, c.text))


def _kept_there(session: Session, who: Principal, numbers: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Of kept generations: document and text by the chunk's number in the indexes."""
    ids = [-number for number in numbers if number < 0]
    if not ids:
        return {}
    query = (
        select(VersionChunk, DocumentVersion.document_id)
        .join(DocumentVersion, DocumentVersion.id == VersionChunk.version_id)
        .where(VersionChunk.id.in_(ids), DocumentVersion.tenant_id == who.tenant_id, files.kept_open_to(who))
    )
    return {chunk.number: (document_id, chunk.text) for chunk, document_id in session.execute(query)}


def show(
    parts: ApiParts,
    who: Principal,
    corpus_id: str,
    query: str | list[str],
    top_k: int,
    filters: dict[str, Any] | None,
    threshold: float | None,
    as_of: float | None = None,
    rerank: bool = True,
) -> dict[str, Any]:
    """Search results in the order of the search; of several queries each chunk with its best score, by their scores. Raises
    NotFound, UserError."""
    with parts.catalogue.read() as session:
        corpora.find(session, who, corpus_id)
    queries = [query] if isinstance(query, str) else query
    best: dict[int, RetrievedChunk] = {}
    for one in queries:
        for chunk in parts.retriever.search(
            tenant_id=who.tenant_id,
            corpus_ids=[corpus_id],
            query=one,
            top_k=top_k,
            principals=who.names,
            filters=filters,
            score_threshold=threshold,
            as_of=as_of,
            rerank=rerank,
        ):
            if chunk.chunk_id not in best or best[chunk.chunk_id].score < chunk.score:
                best[chunk.chunk_id] = chunk
    ranked = list(best.values()) if len(queries) == 1 else sorted(best.values(), key=lambda chunk: -chunk.score)[:top_k]
    return {
        "object": "vector_store.search_results.page",
        "search_query": queries,
        "data": [_shape(chunk) for chunk in ranked],
        "has_more": False,
        "next_page": None,
    }


def _shape(chunk: RetrievedChunk) -> dict[str, Any]:
    return {
        "file_id": chunk.file_id,
        "filename": chunk.path,
        "score": chunk.score,
        "attributes": chunk.attributes,
        "content": [{"type": "text", "text": chunk.text}],
        "document_id": chunk.document_id,
        "version": chunk.version,
        "headings": list(chunk.headings),
        "start": chunk.start,
        "end": chunk.end,
        "page_start": chunk.page_start,
        "page_end": chunk.page_end,
        "line_start": chunk.line_start,
        "line_end": chunk.line_end,
    }
