"""A small library in a real database, for two tenants."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import delete, select

from retrieval import words
from retrieval.index import ChunkIndex, open_index
from retrieval.search import Retriever
from storage.anchors import anchors_of
from storage.catalogue.engine import Catalogue, open_catalogue
from storage.catalogue.schema import ChunkRow, Corpus, Document, Tenant


class HashedWords:
    """An embedder without a model: texts that share words are near each other."""

    dimensions = 64
    max_tokens = 256

    def __init__(self, identity: str = "hashed@1") -> None:
        self.identity = identity
        self.calls = 0

    def count_tokens(self, text: str) -> int:
        return len(words.words(text))

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        self.calls += 1
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        vector = np.full(self.dimensions, 1e-3)
        for word in words.words(text):
            digest = hashlib.sha256(word.encode()).digest()
            vector[digest[0] % self.dimensions] += 1 if digest[1] % 2 else -1
        return list(vector / np.linalg.norm(vector))


class Library:
    """What a catalogue holds, with the few moves the tests make."""

    def __init__(self, url: str, embedder: Any = None) -> None:
        self.url = url
        self.embedder = embedder or HashedWords()
        self.catalogue, self.index, self.retriever = self.warm()

    def warm(self) -> tuple[Catalogue, ChunkIndex, Retriever]:
        """Another process's view: its own connections, index and retriever."""
        catalogue = open_catalogue(self.url)
        index = open_index(catalogue, self.embedder)
        return catalogue, index, Retriever(catalogue, index, self.embedder)

    def corpus(self, corpus_id: str, tenant_id: str = "t1") -> None:
        with self.catalogue.write() as session:
            session.merge(Tenant(id=tenant_id, name=tenant_id, created_at=0.0))
            session.flush()
            session.add(
                Corpus(
                    id=corpus_id,
                    tenant_id=tenant_id,
                    name=corpus_id,
                    sharing_group=tenant_id,
                    source=None,
                    attributes={},
                    created_at=0.0,
                    last_active_at=0.0,
                )
            )

    def put(
        self,
        corpus_id: str,
        path: str,
        *texts: str,
        access: list[str] | None = None,
        tokens: int = 0,
        **attributes: object,
    ) -> list[int]:
        with self.catalogue.write() as session:
            tenant_id = session.get_one(Corpus, corpus_id).tenant_id
            document = Document(
                id=f"doc-{corpus_id}-{path}",
                corpus_id=corpus_id,
                tenant_id=tenant_id,
                file_id="file-1",
                path=path,
                sha256="0" * 64,
                status="completed",
                access=access,
                attributes=dict(attributes),
                created_at=0.0,
            )
            session.add(document)
            session.flush()
            rows = [self._chunk(document, ordinal, text, tokens) for ordinal, text in enumerate(texts)]
            session.add_all(rows)
            session.flush()
            vectors = self.embedder.embed(texts)
            self.index.add(
                session, corpus_id, [(r.id, v, r.text) for r, v in zip(rows, vectors, strict=True)]
            )
            return [row.id for row in rows]

    def _chunk(self, document: Document, ordinal: int, text: str, tokens: int) -> ChunkRow:
        ids = [ord(c) for c in text][: tokens or None]
        head, tail = anchors_of(ids) or (None, None)
        return ChunkRow(
            document_id=document.id,
            corpus_id=document.corpus_id,
            tenant_id=document.tenant_id,
            ordinal=ordinal,
            text=text,
            token_ids=struct.pack(f"<{len(ids)}I", *ids),
            start=0,
            end=len(text),
            headings=["Top"],
            line_start=1,
            line_end=2,
            kv_key=None,
            head=head,
            tail=tail,
        )

    def drop(self, corpus_id: str, path: str) -> None:
        with self.catalogue.write() as session:
            of_document = ChunkRow.document_id == f"doc-{corpus_id}-{path}"
            self.index.remove(session, list(session.scalars(select(ChunkRow.id).where(of_document))))
            session.execute(delete(ChunkRow).where(of_document))
            session.execute(delete(Document).where(Document.id == f"doc-{corpus_id}-{path}"))

    def find(
        self, query: str, *corpus_ids: str, tenant_id: str = "t1", top_k: int = 5, **options: object
    ) -> list[str]:
        """Paths, best first."""
        found = self.retriever.search(
            tenant_id=tenant_id, corpus_ids=corpus_ids or ("vs_1",), query=query, top_k=top_k, **options
        )
        return [chunk.path for chunk in found]
