"""Chunks in PostgreSQL: pgvector, exact within the corpora, and a `tsvector` under a GIN index.

An approximate index is left out on purpose: filtered by corpus afterwards, it loses most of what it should
find.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from retrieval import words
from retrieval.index import CREATE_META, MOST_HITS, Hit, IndexMeta, Row
from storage.catalogue.engine import Catalogue
from storage.catalogue.versions import is_past
from storage.types import TextEmbedder

# The column takes vectors of any length, so that a reindex with another model takes no lock against readers.
TABLES = (
    """CREATE TABLE IF NOT EXISTS index_chunk (chunk_id BIGINT PRIMARY KEY, corpus_id VARCHAR(64) NOT NULL,
       embedding vector NOT NULL, words tsvector NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS index_chunk_corpus ON index_chunk (corpus_id)",
    "CREATE INDEX IF NOT EXISTS index_chunk_words ON index_chunk USING gin (words)",
)
LOCK = 0x70726569  # between processes that start together
ADD = """INSERT INTO index_chunk (chunk_id, corpus_id, embedding, words)
    VALUES (:id, :corpus, CAST(:vector AS vector), CAST(:words AS tsvector))"""
WITHIN = "FROM index_chunk WHERE corpus_id = ANY(:corpora)"
OF_DOCUMENTS = "chunk_id IN (SELECT id FROM chunk WHERE document_id = ANY(:documents))"
OF_VERSIONS = "chunk_id IN (SELECT -id FROM version_chunk WHERE version_id = ANY(:documents))"
COPY = """INSERT INTO index_chunk (chunk_id, corpus_id, embedding, words)
    SELECT :new, :corpus, embedding, words FROM index_chunk WHERE chunk_id = :old"""
MOST_POSITION = 16383  # what a tsvector can hold
LONGEST_VECTOR = 900_000  # bytes of words; PostgreSQL refuses a tsvector of 1 MiB


class PostgresIndex:
    def __init__(self, catalogue: Catalogue, embedder: TextEmbedder) -> None:
        self._catalogue = catalogue
        self._embedder = embedder
        self._meta = IndexMeta(embedder)

    def ensure(self) -> None:
        with self._catalogue.read() as session:
            if self._meta.ready(session):
                return
        with self._catalogue.write() as session:
            session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
            if not self._meta.ready(session):
                for statement in (*TABLES, CREATE_META):
                    session.execute(text(statement))
                self.reset(session)

    def reset(self, session: Session) -> None:
        session.execute(text("DELETE FROM index_chunk"))
        self._meta.record(session)

    def add(self, session: Session, corpus_id: str, rows: Sequence[Row]) -> None:
        self._meta.require(session)
        if rows:
            values = [
                {"id": id_, "corpus": corpus_id, "vector": _vector(vector), "words": _tsvector(content)}
                for id_, vector, content in rows
            ]
            session.execute(text(ADD), values)

    def remove(self, session: Session, chunk_ids: Sequence[int]) -> None:
        session.execute(
            text("DELETE FROM index_chunk WHERE chunk_id = ANY(:ids)"),
            {"ids": [int(id_) for id_ in chunk_ids]},
        )

    def copy(self, session: Session, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        if pairs:
            session.execute(text(COPY), [{"old": old, "new": new, "corpus": corpus_id} for old, new in pairs])

    def dense(
        self,
        session: Session,
        corpus_ids: Sequence[str],
        vector: Sequence[float],
        k: int,
        documents: Sequence[str] | None = None,
    ) -> list[Hit]:
        self._meta.require(session)
        where, values = _within(corpus_ids, documents)
        order = "ORDER BY embedding <=> CAST(:vector AS vector), chunk_id LIMIT :k"
        rows = session.execute(
            text(f"SELECT chunk_id, 1 - (embedding <=> CAST(:vector AS vector)) {where} {order}"),
            values | {"vector": _vector(vector), "k": min(k, MOST_HITS)},
        )
        return [(id_, score) for id_, score in rows]

    def lexical(
        self,
        session: Session,
        corpus_ids: Sequence[str],
        query: str,
        k: int,
        documents: Sequence[str] | None = None,
    ) -> list[Hit]:
        """PostgreSQL's rank ignores how rare a word is, so each word is weighed here: idf x ts_rank."""
        self._meta.require(session)
        terms = [_quoted(word) + (":*" if prefix else "") for word, prefix in words.query_words(query)]
        if not terms or not corpus_ids:
            return []
        where, values = _within(corpus_ids, documents)
        values |= {f"t{i}": term for i, term in enumerate(terms)} | {"any": " | ".join(terms)}
        weights = self._rarity(session, corpus_ids, terms)
        score = " + ".join(
            f"CAST(:w{i} AS float8) * ts_rank(words, CAST(:t{i} AS tsquery), 1)" for i in range(len(terms))
        )
        rows = session.execute(
            text(
                f"SELECT chunk_id, {score} AS score {where} AND words @@ CAST(:any AS tsquery) "
                "ORDER BY score DESC, chunk_id LIMIT :k"
            ),
            values | {f"w{i}": weight for i, weight in enumerate(weights)} | {"k": min(k, MOST_HITS)},
        )
        return [(id_, score) for id_, score in rows]

    def _rarity(self, session: Session, corpus_ids: Sequence[str], terms: list[str]) -> list[float]:
        """idf of each term, counted within these corpora alone, as BM25 has it."""
        where, values = _within(corpus_ids, None)
        holders = ", ".join(
            f"count(*) FILTER (WHERE words @@ CAST(:t{i} AS tsquery))" for i in range(len(terms))
        )
        held_by_any = "words @@ CAST(:any AS tsquery)"
        sql = f"SELECT ARRAY[{holders}], (SELECT count(*) {where}) {where} AND {held_by_any}"
        values |= {f"t{i}": term for i, term in enumerate(terms)} | {"any": " | ".join(terms)}
        held, total = session.execute(text(sql), values).one()
        return [_idf(total, count) for count in held]


def _idf(total: int, holders: int) -> float:
    return math.log(1 + (total - holders + 0.5) / (holders + 0.5))


def _within(corpus_ids: Sequence[str], documents: Sequence[str] | None) -> tuple[str, dict[str, Any]]:
    if documents is None:
        return WITHIN, {"corpora": list(corpus_ids)}
    of = f"({OF_DOCUMENTS} OR {OF_VERSIONS})" if any(map(is_past, corpus_ids)) else OF_DOCUMENTS
    return f"{WITHIN} AND {of}", {"corpora": list(corpus_ids), "documents": list(documents)}


def _vector(vector: Sequence[float]) -> str:
    return "[" + ",".join(format(value, ".9g") for value in vector) + "]"


def _quoted(word: str) -> str:
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def _tsvector(content: str) -> str:
    """The words with their positions. PostgreSQL's parser would cut them again, by its locale's rules."""
    parts, size = [], 0
    for position, word in enumerate(words.words(content), start=1):
        size += len(word.encode()) + 8
        if size > LONGEST_VECTOR:
            break
        parts.append(f"{_quoted(word)}:{min(position, MOST_POSITION)}")
    return " ".join(parts)
