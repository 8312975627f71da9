"""Chunks beside those that were found, and found chunks in the order in which a reader expects them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, select, tuple_
from sqlalchemy.orm import Session

from storage.catalogue.schema import ChunkRow, Document
from storage.types import RetrievedChunk

Found = tuple[Row[Any], float]
BESIDE = (1, -1)  # what follows is more often missed than what comes before


def with_neighbours(session: Session, columns: Sequence[Any], chosen: Sequence[Found], budget: int) -> list[Found]:
    """Fill what is left of the budget with the chunks before and behind each found one, best first, where they stand
    under the same headings. They come behind all that was found, with the score of what they stand beside."""
    held = {row.id for row, _ in chosen}
    left = budget - sum(len(row.token_ids) // 4 for row, _ in chosen)
    places = {(row.document_id, row.ordinal + step) for row, _ in chosen for step in BESIDE}
    query = select(*columns).join(Document, Document.id == ChunkRow.document_id)
    beside = tuple_(ChunkRow.document_id, ChunkRow.ordinal).in_(sorted(places))
    rows = {(row.document_id, row.ordinal): row for row in session.execute(query.where(beside))}
    result = list(chosen)
    for row, score in chosen:
        for step in BESIDE:
            other = rows.get((row.document_id, row.ordinal + step))
            if other is None or other.id in held or _sections(other).isdisjoint(_sections(row)):
                continue
            tokens = len(other.token_ids) // 4
            if tokens <= left:
                held.add(other.id)
                left -= tokens
                result.append((other, score))
    return result


def _sections(row: Row[Any]) -> set[tuple[str, ...]]:
    """The heading path under which a chunk stands. That of a chunk which begins inside a table or a definition may end with
    what that is called, and the chunk's own section be the rest."""
    return {tuple(row.headings), tuple(row.headings[:-1] if row.header else row.headings)}


def in_reading_order(chunks: Sequence[RetrievedChunk]) -> list[RetrievedChunk]:
    """The chunks best first, except that those which follow one another in a document stand together, in its order, at the
    place of the best of them."""
    places = {(chunk.document_id, chunk.ordinal): chunk for chunk in chunks}
    result: list[RetrievedChunk] = []
    for chunk in chunks:
        ordinal = chunk.ordinal
        if (chunk.document_id, ordinal) not in places:
            continue  # has come along with a better one
        while (chunk.document_id, ordinal - 1) in places:
            ordinal -= 1
        while (place := (chunk.document_id, ordinal)) in places:
            result.append(places.pop(place))
            ordinal += 1
    return result
