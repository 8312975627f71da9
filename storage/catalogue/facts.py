"""Documents as policies see them, read from the catalogue."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.catalogue.schema import ChunkRow, Corpus, Document, DocumentUse, KVObject
from storage.policy.types import DocumentFacts

BATCH = 500


def facts_of(session: Session, documents: Sequence[tuple[Document, str]], with_use: bool) -> list[DocumentFacts]:
    """The facts of documents and their corpora's names; how often they were used only if it is asked for."""
    used = _uses(session, [document.id for document, _ in documents]) if with_use else {}
    return [_facts(document, corpus, used.get(document.id, [])) for document, corpus in documents]


def page_of(session: Session, corpora: Iterable[str], after: str, limit: int = BATCH) -> list[tuple[Document, str]]:
    """Documents of these corpora with their corpora's names, in the order of their ids, from behind `after` on."""
    query = select(Document, Corpus.name).join(Corpus, Corpus.id == Document.corpus_id)
    query = query.where(Document.corpus_id.in_(list(corpora)), Document.id > after).order_by(Document.id).limit(limit)
    return [(document, name) for document, name in session.execute(query)]


class StoredChunk(NamedTuple):
    """`codec`: of the stored object; None: the reader's own. `bytes`: of the object. `owed_at`: UTC seconds."""

    codec: str | None
    tokens: int
    bytes: int
    owed_at: float


def stored_chunks(session: Session, keys: Collection[str]) -> dict[str, StoredChunk]:
    """What is known of each key that a chunk has."""
    found: dict[str, StoredChunk] = {}
    ordered = list(keys)
    for at in range(0, len(ordered), BATCH):
        query = select(ChunkRow.kv_key, Document.codec, KVObject.tokens, KVObject.bytes, KVObject.created_at)
        query = query.join(Document, Document.id == ChunkRow.document_id).join(KVObject, KVObject.key == ChunkRow.kv_key)
        rows = session.execute(query.where(ChunkRow.kv_key.in_(ordered[at : at + BATCH])).distinct())
        found.update({str(key): StoredChunk(codec, tokens, size, at) for key, codec, tokens, size, at in rows})
    return found


def _uses(session: Session, ids: Sequence[str]) -> dict[str, list[tuple[int, int, float]]]:
    found: dict[str, list[tuple[int, int, float]]] = {}
    for at in range(0, len(ids), BATCH):
        query = select(DocumentUse).where(DocumentUse.document_id.in_(ids[at : at + BATCH]))
        for row in session.scalars(query):
            found.setdefault(row.document_id, []).append((row.day, row.hits, row.last_at))
    return found


def _facts(document: Document, corpus: str, uses: list[tuple[int, int, float]]) -> DocumentFacts:
    return DocumentFacts(
        tenant_id=document.tenant_id,
        corpus_id=document.corpus_id,
        corpus=corpus,
        document_id=document.id,
        path=document.path,
        attributes=dict(document.attributes),
        created_at=document.created_at,
        used_at=max((last for _, _, last in uses), default=None),
        hits=tuple(sorted((day, hits) for day, hits, _ in uses)),
    )
