"""Chunks in SQLite: sqlite-vec partitioned by corpus, and an FTS5 table."""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import text
from sqlalchemy.orm import Session

from retrieval import words
from retrieval.index import CREATE_META, MOST_HITS, Hit, IndexMeta, Row
from storage.catalogue.engine import Catalogue
from storage.catalogue.versions import is_past
from storage.types import TextEmbedder

# A partition grows by whole blocks of `chunk_size` vectors: small, so that a small corpus stays small.
VECTORS = """CREATE VIRTUAL TABLE index_vector USING vec0(chunk_id INTEGER PRIMARY KEY,
    corpus_id TEXT PARTITION KEY, embedding FLOAT[{dimensions}] distance_metric=cosine, chunk_size=256)"""
# Words arrive cut and normalised: the tokenizer `ascii` only splits at spaces then.
WORDS = "CREATE VIRTUAL TABLE index_words USING fts5(corpus, words, tokenize = 'ascii tokenchars ''_''')"
# A deleted word leaves the file at once, not at some later merge. SQLite 3.42 and later.
ERASE = "INSERT INTO index_words (index_words, rank) VALUES ('secure-delete', 1)"

OF_DOCUMENTS = "(SELECT id FROM chunk WHERE document_id IN (SELECT value FROM json_each(:documents)))"
OF_VERSIONS = "(SELECT -id FROM version_chunk WHERE version_id IN (SELECT value FROM json_each(:documents)))"
COPIES = (
    """INSERT INTO index_vector (chunk_id, corpus_id, embedding)
       SELECT :new, :corpus, embedding FROM index_vector WHERE chunk_id = :old""",
    "INSERT INTO index_words (rowid, corpus, words) SELECT :new, :word, words FROM index_words WHERE rowid = :old",
)
DENSE = "SELECT chunk_id, 1 - distance FROM index_vector WHERE embedding MATCH :vector AND k = :k"
LEXICAL = "SELECT rowid, -bm25(index_words, 0, 1) AS score FROM index_words WHERE index_words MATCH :query"


class SQLiteIndex:
    def __init__(self, catalogue: Catalogue, embedder: TextEmbedder) -> None:
        self._catalogue = catalogue
        self._embedder = embedder
        self._meta = IndexMeta(embedder)

    def ensure(self) -> None:
        with self._catalogue.read() as session:
            if self._meta.ready(session):
                return
        _ = self._embedder.dimensions, self._embedder.identity  # loads the model: not while everybody's write waits
        with self._catalogue.write() as session:
            if not self._meta.ready(session):
                session.execute(text(CREATE_META))
                self.reset(session)

    def reset(self, session: Session) -> None:
        for table in ("index_vector", "index_words"):
            session.execute(text(f"DROP TABLE IF EXISTS {table}"))
        session.execute(text(VECTORS.format(dimensions=int(self._embedder.dimensions))))
        session.execute(text(WORDS))
        version = session.scalar(text("SELECT sqlite_version()"))
        if tuple(map(int, str(version).split("."))) >= (3, 42):
            session.execute(text(ERASE))
        self._meta.record(session)

    def add(self, session: Session, corpus_id: str, rows: Sequence[Row]) -> None:
        self._meta.require(session)
        if not rows:
            return
        session.execute(
            text("INSERT INTO index_vector (chunk_id, corpus_id, embedding) VALUES (:id, :corpus, :vector)"),
            [{"id": id_, "corpus": corpus_id, "vector": _packed(vector)} for id_, vector, _ in rows],
        )
        session.execute(
            text("INSERT INTO index_words (rowid, corpus, words) VALUES (:id, :corpus, :words)"),
            [
                {"id": id_, "corpus": _corpus_word(corpus_id), "words": " ".join(words.words(content))}
                for id_, _, content in rows
            ],
        )

    def remove(self, session: Session, chunk_ids: Sequence[int]) -> None:
        ids = {"ids": json.dumps(list(chunk_ids))}
        for table, key in (("index_vector", "chunk_id"), ("index_words", "rowid")):
            session.execute(
                text(f"DELETE FROM {table} WHERE {key} IN (SELECT value FROM json_each(:ids))"), ids
            )

    def copy(self, session: Session, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        place = {"corpus": corpus_id, "word": _corpus_word(corpus_id)}
        for statement in COPIES if pairs else ():
            session.execute(text(statement), [{"old": old, "new": new, **place} for old, new in pairs])

    def dense(
        self,
        session: Session,
        corpus_ids: Sequence[str],
        vector: Sequence[float],
        k: int,
        documents: Sequence[str] | None = None,
    ) -> list[Hit]:
        self._meta.require(session)
        values: dict[str, Any] = {"vector": _packed(vector), "k": min(k, MOST_HITS)}
        sql = DENSE + " AND corpus_id = :corpus"
        if documents is not None:
            values["documents"] = json.dumps(list(documents))
        hits: list[Hit] = []
        for corpus_id in dict.fromkeys(corpus_ids):  # a partition at a time
            of = f" AND chunk_id IN {OF_VERSIONS if is_past(corpus_id) else OF_DOCUMENTS}" if documents is not None else ""
            rows = session.execute(text(sql + of), values | {"corpus": corpus_id})
            hits += [(id_, score) for id_, score in rows]
        return heapq.nsmallest(values["k"], hits, key=lambda hit: (-hit[1], hit[0]))

    def lexical(
        self,
        session: Session,
        corpus_ids: Sequence[str],
        query: str,
        k: int,
        documents: Sequence[str] | None = None,
    ) -> list[Hit]:
        self._meta.require(session)
        wanted = words.query_words(query)
        if not wanted or not corpus_ids:
            return []
        corpora = " OR ".join(f'"{_corpus_word(corpus_id)}"' for corpus_id in corpus_ids)
        content = " OR ".join(f'"{word}"{"*" if prefix else ""}' for word, prefix in wanted)
        values: dict[str, Any] = {
            "query": f"corpus : ({corpora}) AND words : ({content})",
            "k": min(k, MOST_HITS),
        }
        sql = LEXICAL
        if documents is not None:
            # The plus sign keeps SQLite from running the text search once per chunk of the list.
            of = OF_DOCUMENTS
            if any(map(is_past, corpus_ids)):
                of = f"({OF_DOCUMENTS[1:-1]} UNION ALL {OF_VERSIONS[1:-1]})"
            sql += f" AND +rowid IN {of}"
            values["documents"] = json.dumps(list(documents))
        rows = session.execute(text(sql + " ORDER BY score DESC, rowid LIMIT :k"), values)
        return [(id_, score) for id_, score in rows]


def _packed(vector: Sequence[float]) -> bytes:
    return np.asarray(vector, dtype="<f4").tobytes()


def _corpus_word(corpus_id: str) -> str:
    """A corpus id as one word in lower case, without two ids ever becoming the same word."""
    return "c" + corpus_id.encode().hex()
