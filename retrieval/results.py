"""Rows of what was found: read within the asker's rights, chosen, made into chunks, and looked at again at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from sqlalchemy import Row, Select, bindparam, select
from sqlalchemy.orm import Session

from retrieval.ask import Ask
from retrieval.index import Hit
from retrieval.versions import kept_rows
from storage.catalogue.schema import ChunkRow, Document
from storage.catalogue.versions import current_then
from storage.types import RetrievedChunk

FOUND = (
    ChunkRow.id, ChunkRow.ordinal, ChunkRow.text, ChunkRow.token_ids, ChunkRow.start, ChunkRow.end, ChunkRow.headings,
    ChunkRow.page_start, ChunkRow.page_end, ChunkRow.line_start, ChunkRow.line_end, ChunkRow.header, ChunkRow.kv_key,
    Document.id.label("document_id"), Document.tenant_id, Document.corpus_id, Document.file_id, Document.path,
    Document.sha256, Document.access, Document.attributes, Document.codec, Document.not_stored,
)  # fmt: skip
STILL = (
    ChunkRow.id, ChunkRow.token_ids, Document.id.label("document_id"), Document.tenant_id, Document.corpus_id,
    Document.access, Document.attributes,
)  # fmt: skip


def confirmed(session: Session, ask: Ask, found: list[RetrievedChunk]) -> list[RetrievedChunk]:
    """What is still there and the asker's to see. SQLite may give a deleted chunk's id to another chunk."""
    rows = {row.id: row for row in visible(session, ask, [chunk.chunk_id for chunk in found], STILL)}
    return [
        chunk
        for chunk in found
        if (row := rows.get(chunk.chunk_id)) is not None
        and (row.document_id, _token_ids(row.token_ids)) == (chunk.document_id, chunk.token_ids)
    ]


@lru_cache
def _of_ids(columns: tuple[Any, ...]) -> Select[Any]:
    """Made once: making and compiling it costs more than what it asks for."""
    query = select(*columns).join(Document, Document.id == ChunkRow.document_id)
    return query.where(ChunkRow.id.in_(bindparam("ids", expanding=True)))


def visible(session: Session, ask: Ask, chunk_ids: Sequence[int], columns: tuple[Any, ...]) -> Iterator[Row[Any]]:
    """Of these chunks the ones that exist and are the asker's to see, by their rows and not by the index."""
    query = _of_ids(columns)
    kept: Sequence[Row[Any]] = ()
    if ask.as_of is not None:
        query = query.where(current_then(ask.as_of))
        kept = kept_rows(session, chunk_ids, ask.as_of)
    rows = session.connection().execute(query, {"ids": chunk_ids})
    return (row for row in (*rows, *kept) if ask.rules.permits(row))


def rows_in_order(session: Session, ask: Ask, hits: list[Hit]) -> Iterator[tuple[Row[Any], float]]:
    """Rows of the hits, best first, read as they are needed."""
    part = min(2 * ask.top_k, 500)
    for start in range(0, len(hits), part):
        some = hits[start : start + part]
        rows = {row.id: row for row in visible(session, ask, [chunk_id for chunk_id, _ in some], FOUND)}
        for chunk_id, score in some:
            if chunk_id in rows:
                yield rows[chunk_id], score


def choose(rows: Iterable[tuple[Row[Any], float]], ask: Ask) -> list[tuple[Row[Any], float]]:
    """Down the ranking: a text once, at or above the threshold, and whatever still fits the budget."""
    chosen: list[tuple[Row[Any], float]] = []
    texts: set[bytes] = set()
    left = ask.token_budget
    for row, score in rows:
        if len(chosen) == ask.top_k:
            break
        if ask.score_threshold is not None and score < ask.score_threshold:
            continue
        tokens = len(row.token_ids) // 4
        if row.token_ids in texts or (left is not None and tokens > left):
            continue
        texts.add(row.token_ids)
        left = None if left is None else left - tokens
        chosen.append((row, score))
    return chosen


def retrieved(row: Row[Any], score: float) -> RetrievedChunk:
    """A chunk made of its row, which has the columns FOUND."""
    return RetrievedChunk(
        chunk_id=row.id,
        document_id=row.document_id,
        corpus_id=row.corpus_id,
        file_id=row.file_id,
        path=row.path,
        version=row.sha256,
        text=row.text,
        token_ids=_token_ids(row.token_ids),
        start=row.start,
        end=row.end,
        headings=tuple(row.headings),
        page_start=row.page_start,
        page_end=row.page_end,
        line_start=row.line_start,
        line_end=row.line_end,
        score=score,
        kv_key=row.kv_key,
        codec=row.codec,
        not_stored=row.not_stored is not None,
        attributes=dict(row.attributes),
        ordinal=row.ordinal,
        header=row.header,
    )


def _token_ids(token_ids: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(token_ids, dtype="<u4").tolist())
