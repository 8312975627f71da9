"""The two indexes of chunks, by meaning and by words, in the catalogue's own database.

They take part in the caller's transaction: a chunk, its vector and its words appear and vanish together. Each
search is exact within the corpora it is given; rows of other corpora are not ranked at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sqlalchemy import inspect, text
from sqlalchemy.orm import Session

from retrieval import words
from storage.catalogue.engine import Catalogue
from storage.errors import UserError
from storage.types import TextEmbedder

Row = tuple[int, Sequence[float], str]  # chunk id, unit vector, text
Hit = tuple[int, float]  # chunk id, score: more is better
CREATE_META = "CREATE TABLE IF NOT EXISTS index_meta (name VARCHAR(32) PRIMARY KEY, value TEXT NOT NULL)"
MOST_HITS = 4096  # per search; sqlite-vec returns no more


class ChunkIndex(Protocol):
    """One database's way of storing vectors and words."""

    def ensure(self) -> None:
        """Make the tables if absent. UserError if they hold another embedding model's vectors."""
        ...

    def reset(self, session: Session) -> None:
        """Drop all vectors and words, and take this embedder's from now on: the start of a reindex."""
        ...

    def add(self, session: Session, corpus_id: str, rows: Sequence[Row]) -> None: ...

    def remove(self, session: Session, chunk_ids: Sequence[int]) -> None:
        """Unknown ids are ignored."""
        ...

    def copy(self, session: Session, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        """Put the vector and words under each pair's first id under its second as well, in another corpus's partition."""
        ...

    def dense(
        self,
        session: Session,
        corpus_ids: Sequence[str],
        vector: Sequence[float],
        k: int,
        documents: Sequence[str] | None = None,
    ) -> list[Hit]:
        """The k nearest chunks by cosine, best first; of these documents only, if given."""
        ...

    def lexical(
        self,
        session: Session,
        corpus_ids: Sequence[str],
        query: str,
        k: int,
        documents: Sequence[str] | None = None,
    ) -> list[Hit]:
        """The k best chunks that hold any word of the query. The query is plain text, whatever it holds."""
        ...


def open_index(catalogue: Catalogue, embedder: TextEmbedder) -> ChunkIndex:
    """The index that lives in this catalogue's database. Call `ensure()` before first use."""
    if catalogue.dialect == "sqlite":
        from retrieval.sqlite_index import SQLiteIndex

        return SQLiteIndex(catalogue, embedder)
    from retrieval.postgres_index import PostgresIndex

    return PostgresIndex(catalogue, embedder)


class IndexMeta:
    """The table `index_meta`: whose vectors and which rules for words the index holds."""

    def __init__(self, embedder: TextEmbedder) -> None:
        self._embedder = embedder

    def ready(self, session: Session) -> bool:
        """False if there is no index yet. UserError if it is another model's."""
        if not inspect(session.connection()).has_table("index_meta"):
            return False
        recorded = self._read(session)
        if recorded:
            self._compare(recorded)
        return bool(recorded)

    def require(self, session: Session) -> None:
        """Before each use: another process may have begun a reindex with another model since."""
        self._compare(self._read(session))

    def record(self, session: Session) -> None:
        session.execute(text("DELETE FROM index_meta"))
        insert = text("INSERT INTO index_meta (name, value) VALUES (:name, :value)")
        session.execute(insert, [{"name": name, "value": value} for name, value in self._expected().items()])

    def _expected(self) -> dict[str, str]:
        return {"embedding": self._embedder.identity, "words": words.VERSION}

    def _read(self, session: Session) -> dict[str, str]:
        rows = session.execute(text("SELECT name, value FROM index_meta"))
        return {row.name: row.value for row in rows}

    def _compare(self, recorded: Mapping[str, str]) -> None:
        for name, expected in self._expected().items():
            if recorded.get(name) != expected:
                raise UserError(
                    f"The index was built with {name} {recorded.get(name)!r}, but {expected!r} is set. "
                    "Their results cannot be mixed: start a reindex, or go back to the earlier setting.",
                    code="reindex_required",
                )
