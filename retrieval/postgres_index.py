"""Chunks in PostgreSQL: pgvector, exact within the corpora, and a `tsvector` under a GIN index.

An approximate index is left out on purpose: filtered by corpus afterwards, it loses most of what it should
find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy.orm import Session

from retrieval import impacts, words
from retrieval.index import MOST_HITS, Generations, Hit, Row, lacking
from retrieval.rules import Rules
from retrieval.sql import run
from storage.catalogue.engine import Catalogue
from storage.types import TextEmbedder

TABLES = (
    """CREATE TABLE index_chunk_{g} (chunk_id BIGINT PRIMARY KEY, corpus_id VARCHAR(64) NOT NULL,
       embedding vector NOT NULL, words tsvector NOT NULL)""",
    "CREATE INDEX index_chunk_{g}_corpus ON index_chunk_{g} (corpus_id)",
    "CREATE INDEX index_chunk_{g}_words ON index_chunk_{g} USING gin (words)",
)
LOCK = 0x70726569  # between processes that start together
ADD = """INSERT INTO index_chunk_{g} (chunk_id, corpus_id, embedding, words)
    VALUES (:id, :corpus, CAST(:vector AS vector), array_to_tsvector(CAST(:words AS text[])))"""
COPY = """INSERT INTO index_chunk_{g} (chunk_id, corpus_id, embedding, words)
    SELECT :new, :corpus, embedding, words FROM index_chunk_{g} WHERE chunk_id = :old"""
LONGEST_VECTOR = 900_000  # bytes of words; PostgreSQL refuses a tsvector of 1 MiB


class PostgresIndex:
    def __init__(self, catalogue: Catalogue, embedder: TextEmbedder) -> None:
        self._catalogue = catalogue
        self.generations = Generations(embedder)
        self._table = f"index_chunk_{self.generations.name}"

    def ensure(self) -> None:
        with self._catalogue.read() as session:
            if self.generations.known(session):
                return
        with self._catalogue.write() as session:
            run(session, "SELECT pg_advisory_xact_lock(:key)", {"key": LOCK})
            if self.generations.register(session):
                for statement in TABLES:
                    run(session, statement.format(g=self.generations.name))

    def add(self, session: Session, corpus_id: str, rows: Sequence[Row]) -> None:
        self.generations.require(session, corpus_id)
        self.stage(session, corpus_id, rows)

    def stage(self, session: Session, corpus_id: str, rows: Sequence[Row]) -> None:
        if rows:
            values = [
                {"id": id_, "corpus": corpus_id, "vector": _vector(vector), "words": _terms(content)}
                for id_, vector, content in rows
            ]
            run(session, ADD.format(g=self.generations.name), values)

    def remove(self, session: Session, chunk_ids: Sequence[int]) -> None:
        for generation in self.generations.all(session):
            held = {"ids": [int(id_) for id_ in chunk_ids]}
            run(session, f"DELETE FROM index_chunk_{generation} WHERE chunk_id = ANY(:ids)", held)

    def drop(self, session: Session, corpus_id: str, generation: str, most: int) -> int:
        table = f"index_chunk_{generation}"
        some = f"SELECT chunk_id FROM {table} WHERE corpus_id = :c LIMIT :most"
        gone = run(session, f"DELETE FROM {table} WHERE chunk_id IN ({some})", {"c": corpus_id, "most": most})
        return int(gone.rowcount)

    def copy(self, session: Session, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        values = [{"old": old, "new": new, "corpus": corpus_id} for old, new in pairs]
        for generation in self.generations.all(session) if pairs else ():
            run(session, COPY.format(g=generation), values)

    def lacking(self, session: Session, corpus_id: str, document_id: str | None = None) -> list[int]:
        return list(run(session, *lacking(self._table, corpus_id, document_id)).scalars())

    def dense(
        self, session: Session, corpus_ids: Sequence[str], vector: Sequence[float], k: int, rules: Rules | None = None
    ) -> list[Hit]:
        where, values = self._within(session, corpus_ids, rules)
        # Of unit vectors the inner product is the cosine, at less work. pgvector's operator gives it negated.
        order = "ORDER BY embedding <#> CAST(:vector AS vector), chunk_id LIMIT :k"
        rows = run(
            session,
            f"SELECT chunk_id, -(embedding <#> CAST(:vector AS vector)) {where} {order}",
            values | {"vector": _vector(vector), "k": min(k, MOST_HITS)},
        )
        return [(id_, score) for id_, score in rows]

    def cosines(self, session: Session, chunk_ids: Sequence[int], vector: Sequence[float]) -> dict[int, float]:
        near = "-(embedding <#> CAST(:vector AS vector))"
        sql = f"SELECT chunk_id, {near} FROM {self._table} WHERE chunk_id = ANY(:ids)"
        return {row[0]: row[1] for row in run(session, sql, {"vector": _vector(vector), "ids": list(chunk_ids)})}

    def lexical(
        self, session: Session, corpus_ids: Sequence[str], query: str, k: int, rules: Rules | None = None
    ) -> list[Hit]:
        wanted = words.query_words(query)
        if not wanted or not corpus_ids:
            return []
        where, values = self._within(session, corpus_ids, rules)
        chunks = int(run(session, f"SELECT count(*) {self._within(session, corpus_ids, None)[0]}", values).scalar())
        some = f"SELECT chunk_id {where} AND words @@ CAST({{query}} AS tsquery) LIMIT {impacts.MOST_POSTINGS + 1}"

        def find(asked: Sequence[tuple[Sequence[str], bool]]) -> list[impacts.Ids]:
            """One statement, whose parts are planned each for its own words."""
            queries = {
                f"q{place}": " & ".join(_quoted(term) + (":*" if prefix else "") for term in terms)
                for place, (terms, prefix) in enumerate(asked)
            }
            lists = ", ".join(f"ARRAY({some.format(query=':' + name)})" for name in queries)
            found = run(session, f"SELECT {lists}", values | queries).one()
            return [np.asarray(ids, dtype=np.int64) for ids in found]

        ids, scores = impacts.rank(wanted, chunks, find)
        k = min(k, MOST_HITS)
        return [(int(id_), float(score)) for id_, score in zip(ids[:k], scores[:k], strict=True)]

    def _within(self, session: Session, corpus_ids: Sequence[str], rules: Rules | None) -> tuple[str, dict[str, Any]]:
        where = f"FROM {self._table} WHERE corpus_id = ANY(:corpora)"
        values: dict[str, Any] = {"corpora": list(corpus_ids)}
        if rules is None:
            return where, values
        passed, more = rules.passing(session)
        return f"{where} AND chunk_id IN ({passed})", values | more


def _vector(vector: Sequence[float]) -> str:
    return "[" + ",".join(format(value, ".9g") for value in vector) + "]"


def _quoted(word: str) -> str:
    return "'" + word.replace("\\", "\\\\").replace("'", "''") + "'"


def _terms(content: str) -> list[str]:
    terms, size = [], 0
    for term in impacts.terms(words.words(content)):
        size += len(term.encode()) + 8
        if size > LONGEST_VECTOR:
            break
        terms.append(term)
    return terms
