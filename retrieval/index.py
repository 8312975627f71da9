"""The two indexes of chunks, by meaning and by words, in the catalogue's own database.

They take part in the caller's transaction: a chunk, its vector and its words appear and vanish together. Rows of
corpora that are not asked for are not ranked at all.

All rows that one embedding model and one set of rules for words have made are a *generation*, in tables of its own.
A corpus is searched in the generation that its row names; a reindex fills another beside it and flips the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session

from retrieval import words
from retrieval.rules import Rules
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import Corpus, IndexGeneration
from storage.catalogue.versions import past_of
from storage.errors import UserError
from storage.types import TextEmbedder

Row = tuple[int, Sequence[float], str]  # chunk id, unit vector, text
Hit = tuple[int, float]  # chunk id, score: more is better
MOST_HITS = 4096  # per search
OWNED = (  # made once: making and compiling it costs more than what it asks for
    select(Corpus.id, Corpus.index_generation)
    .where(Corpus.id.in_(bindparam("ids", expanding=True)), Corpus.tenant_id == bindparam("tenant"))
    .order_by(Corpus.id)
)
LAYOUT = "tables-2"  # of what the generation's tables hold: change it with them


class ChunkIndex(Protocol):
    """One database's way of storing vectors and words. Its generation is the embedder's."""

    @property
    def generations(self) -> Generations: ...

    def ensure(self) -> None:
        """Make the generation's tables if absent."""
        ...

    def add(self, session: Session, corpus_id: str, rows: Sequence[Row]) -> None:
        """Make chunks searchable. UserError if the corpus is in another generation."""
        ...

    def stage(self, session: Session, corpus_id: str, rows: Sequence[Row]) -> None:
        """Write chunks for a corpus that is still in another generation: nobody finds them before `Generations.flip`."""
        ...

    def remove(self, session: Session, chunk_ids: Sequence[int]) -> None:
        """From every generation. Unknown ids are ignored."""
        ...

    def drop(self, session: Session, corpus_id: str, generation: str, most: int) -> int:
        """Remove chunks of a corpus from another generation, `most` at a time; how many there were."""
        ...

    def copy(self, session: Session, pairs: Sequence[tuple[int, int]], corpus_id: str) -> None:
        """Put the vector and words under each pair's first id under its second as well, in another corpus's partition, in
        every generation that holds them."""
        ...

    def lacking(self, session: Session, corpus_id: str, document_id: str | None = None) -> list[int]:
        """Chunks of the corpus with its kept generations, or of one document as it is, that this generation of the index
        does not hold, by id."""
        ...

    def dense(
        self, session: Session, corpus_ids: Sequence[str], vector: Sequence[float], k: int, rules: Rules | None = None
    ) -> list[Hit]:
        """The k nearest chunks by cosine, best first; of those only that the rules let through, if given."""
        ...

    def lexical(
        self, session: Session, corpus_ids: Sequence[str], query: str, k: int, rules: Rules | None = None
    ) -> list[Hit]:
        """The k best chunks that hold any word of the query. The query is plain text, whatever it holds. A score is 1 for
        a chunk that holds each word once, and as much less as it lacks words, the more the rarer they are."""
        ...

    def cosines(self, session: Session, chunk_ids: Sequence[int], vector: Sequence[float]) -> dict[int, float]:
        """How near each of these chunks is, as far as this generation holds it."""
        ...


def open_index(catalogue: Catalogue, embedder: TextEmbedder) -> ChunkIndex:
    """The index that lives in this catalogue's database. Call `ensure()` before first use."""
    if catalogue.dialect == "sqlite":
        from retrieval.sqlite_index import SQLiteIndex

        return SQLiteIndex(catalogue, embedder)
    from retrieval.postgres_index import PostgresIndex

    return PostgresIndex(catalogue, embedder)


class Generations:
    """Which generation is ours, and which one a corpus is in."""

    def __init__(self, embedder: TextEmbedder) -> None:
        self.embedding = embedder.identity
        self.name = hashlib.sha256(f"{self.embedding}\0{words.VERSION}\0{LAYOUT}".encode()).hexdigest()[:12]

    def register(self, session: Session) -> bool:
        """Note that this generation's tables exist from now on; False if they do already."""
        if session.get(IndexGeneration, self.name) is not None:
            return False
        session.add(IndexGeneration(name=self.name, embedding=self.embedding, words=words.VERSION))
        return True

    def known(self, session: Session) -> bool:
        return session.get(IndexGeneration, self.name) is not None

    def all(self, session: Session) -> list[str]:
        """Every generation that has tables."""
        return list(session.scalars(select(IndexGeneration.name)))

    def require(self, session: Session, corpus_id: str) -> None:
        """Take a corpus that has no index yet into this generation. UserError if it is in another one.

        Workers commit into one corpus side by side: what they hold of its row (rows that refer to it hold the same) keeps
        only a flip away."""
        shared = select(Corpus.index_generation).where(Corpus.id == corpus_id).with_for_update(read=True, key_share=True)
        found = session.scalar(shared)
        if found is None:
            first = update(Corpus).where(Corpus.id == corpus_id, Corpus.index_generation.is_(None))
            session.execute(first.values(index_generation=self.name))
            found = session.scalar(shared)
        if found not in (None, self.name):  # None: the corpus is gone, and the commit will say so
            raise self.refusal(session, corpus_id, found)

    def flip(self, session: Session, corpus_id: str, index: ChunkIndex) -> bool:
        """Let searches in the corpus use this generation from the commit on. False, and nothing done, while it lacks a
        chunk."""
        session.execute(select(Corpus.id).where(Corpus.id == corpus_id).with_for_update())
        if index.lacking(session, corpus_id):
            return False
        session.execute(update(Corpus).where(Corpus.id == corpus_id).values(index_generation=self.name))
        return True

    def clear(self, session: Session, corpus_id: str, index: ChunkIndex, most: int) -> int:
        """Remove what other generations hold of a corpus that is in this one, `most` chunks at a time, since nobody can
        write meanwhile; how many there were. What is left if this stops early is found by nobody, and leaves with its
        chunk."""
        for other in self.all(session):
            for partition in (corpus_id, past_of(corpus_id)) if other != self.name else ():
                if dropped := index.drop(session, partition, other, most):
                    return dropped
        return 0

    def refusal(self, session: Session, corpus_id: str, found: str) -> UserError:
        built: Any = session.get(IndexGeneration, found)
        by = f"with the embedding model {built.embedding!r}" if built else "by an earlier version"
        return UserError(
            f"The index of {corpus_id} was built {by}, but {self.embedding!r} is set. Their results cannot be mixed: "
            f"run `preread reindex {corpus_id}`, or go back to the earlier setting.",
            code="reindex_required",
        )


def owned_corpora(session: Session, generations: Generations, tenant_id: str, corpus_ids: Sequence[str]) -> list[str]:
    """Those of the corpora that are the tenant's and have an index. UserError if one is in another generation."""
    rows = session.connection().execute(OWNED, {"ids": list(corpus_ids), "tenant": tenant_id}).all()
    for corpus_id, generation in rows:
        if generation not in (None, generations.name):
            raise generations.refusal(session, corpus_id, generation)
    return [corpus_id for corpus_id, generation in rows if generation is not None]


def lacking(table: str, corpus_id: str, document_id: str | None) -> tuple[str, dict[str, str]]:
    """A query for `ChunkIndex.lacking`, with its values; `table` holds a row for each chunk that is there."""
    absent = f"NOT EXISTS (SELECT 1 FROM {table} i WHERE i.chunk_id = {{}})"
    if document_id is not None:
        return f"SELECT id FROM chunk WHERE document_id = :of AND {absent.format('chunk.id')} ORDER BY id", {"of": document_id}
    kept = "SELECT -k.id FROM version_chunk k JOIN document_version v ON v.id = k.version_id WHERE v.corpus_id = :of"
    sql = f"SELECT id FROM chunk WHERE corpus_id = :of AND {absent.format('chunk.id')}"
    return f"{sql} UNION ALL {kept} AND {absent.format('-k.id')} ORDER BY 1", {"of": corpus_id}
